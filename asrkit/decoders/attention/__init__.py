"""Decoding by attention, for models that remember and follow: `aed_greedy`, `aed_beam`, which CTC
may join, and `ctc_draft`, which `aed_greedy` verifies.
"""

from asrkit.decoders.attention.alignment import attention_frames
from asrkit.decoders.attention.beam import aed_beam
from asrkit.decoders.attention.greedy import aed_greedy, ctc_draft
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
