"""Decoding by attention: `aed_greedy`, with a draft (`ctc_draft`) or without, and `aed_beam`."""

from asrkit.decoders.attention.alignment import attention_frames
from asrkit.decoders.attention.beam import aed_beam
from asrkit.decoders.attention.draft import ctc_draft
from asrkit.decoders.attention.greedy import aed_greedy
from asrkit.decoders.attention.protocol import Attention, Suppressing
from asrkit.decoders.attention.timestamps import TimedMemory, Timestamps

__all__ = [
    "Attention",
    "Suppressing",
    "TimedMemory",
    "Timestamps",
    "aed_beam",
    "aed_greedy",
    "attention_frames",
    "ctc_draft",
]
