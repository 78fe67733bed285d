"""Decoders: from scores to labels. Each takes a batch and returns one `Hypotheses`."""

from asrkit.decoders.attention import (
    Attention,
    Suppressing,
    aed_beam,
    aed_greedy,
    attention_frames,
    ctc_draft,
)
from asrkit.decoders.ctc import ctc_greedy, ctc_greedy_sequential
from asrkit.decoders.ctc.alignment import ctc_alignment
from asrkit.decoders.ctc.beam import ctc_beam
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.ngram import NGram, WordNGram
from asrkit.decoders.transducer import Transducer, transducer_greedy
from asrkit.decoders.transducer.graphs import release_graphs

__all__ = [
    "Attention",
    "Hypotheses",
    "NGram",
    "Suppressing",
    "Transducer",
    "WordNGram",
    "aed_beam",
    "aed_greedy",
    "attention_frames",
    "ctc_alignment",
    "ctc_beam",
    "ctc_draft",
    "ctc_greedy",
    "ctc_greedy_sequential",
    "release_graphs",
    "transducer_greedy",
]
