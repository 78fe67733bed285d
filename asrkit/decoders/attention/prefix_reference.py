"""Scores of CTC for a text and for all texts that begin with it, in plain loops over frames."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from asrkit.decoders.beams import log_add


class PrefixScore(NamedTuple):
    """Log-probabilities in nats."""

    prefix: float  # of all texts that begin with the labels
    text: float  # of the text itself


def prefix_score(log_probs: Sequence[Sequence[float]], labels: Sequence[int]) -> PrefixScore:
    """What CTC says of `labels`: Graves 2012, section 7.5.3, a label after another.

    Args:
        log_probs: T rows of V + 1 log-probabilities in nats, blank last.
        labels: Tokens below V.
    """
    T = len(log_probs)
    # alignments of the labels so far with the first t frames, by what they end in
    in_label = [-inf] * (T + 1)
    in_blank = [0.0]
    for frame in log_probs:
        in_blank.append(in_blank[-1] + frame[-1])
    prefix = 0.0
    last = None
    for label in labels:
        longer_label = [-inf]
        longer_blank = [-inf]
        prefix = -inf
        for t, frame in enumerate(log_probs):
            enters = in_blank[t]
            if label != last:
                enters = log_add(enters, in_label[t])
            prefix = log_add(prefix, enters + frame[label])
            longer_blank.append(log_add(longer_blank[t], longer_label[t]) + frame[-1])
            longer_label.append(log_add(longer_label[t], enters) + frame[label])
        in_label = longer_label
        in_blank = longer_blank
        last = label
    return PrefixScore(prefix, log_add(in_label[T], in_blank[T]))
