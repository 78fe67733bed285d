"""From scores to labels. Every decoder takes a batch and returns one `Hypotheses`."""

from asrkit.decoders.ctc import ctc_greedy, ctc_greedy_sequential
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.ngram import NGram
from asrkit.decoders.transducer import Transducer, transducer_greedy
from asrkit.decoders.transducer.beam import transducer_beam
from asrkit.decoders.transducer.beam_reference import transducer_beam_reference
from asrkit.decoders.transducer.graphs import release_graphs

__all__ = [
    "Hypotheses",
    "NGram",
    "Transducer",
    "ctc_greedy",
    "ctc_greedy_sequential",
    "release_graphs",
    "transducer_beam",
    "transducer_beam_reference",
    "transducer_greedy",
]
