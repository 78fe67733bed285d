"""The likeliest CTC alignment of given labels to frames (Viterbi).

It gives times to a text that another decoder wrote, such as one by attention.
Source: Graves et al. 2006, section 4.1, with the maximum in place of the sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.ctc.sequential import blank_index
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.shapes import dims, expect


class Alignment(NamedTuple):
    """Labels in time. If a text has no alignment, all its frames and durations are -1."""

    frames: Tensor  # (B, N) int64, first frame of each label's run, padding -1
    durations: Tensor  # (B, N) int64, frames of the run, padding -1
    scores: Tensor  # (B,) log-probability in nats, float32 or float64; -inf without an alignment


def ctc_alignment(
    log_probs: Tensor, lengths: Tensor, hypotheses: Hypotheses, *, blank: int = -1
) -> Alignment:
    """The likeliest alignment of each text to its frames.

    A text has no alignment if a frame is NaN or if there are too few frames for its labels and for
    a blank between equal labels. Memory grows with N times the root of T.

    Args:
        log_probs: (B, T, V) log-probabilities in nats, float of 16 bits or more; added up in
            float64.
        lengths: (B,) valid frames, int32 or int64; 0 is allowed.
        hypotheses: The texts of these B utterances; only the labels are used.
        blank: Index of the blank; negative counts from the end.

    Raises:
        ValueError: The hypotheses belong to another batch, or a label is not one of CTC's.

    >>> log_probs = torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]]]).log()
    >>> greedy = Hypotheses.from_lists([[(0, 0, 0)]], [torch.zeros(())], "by hand")
    >>> alignment = ctc_alignment(log_probs, torch.tensor([3]), greedy)
    >>> alignment.frames.tolist(), alignment.durations.tolist()
    ([[1]], [[2]])
    """
    check_batch(log_probs, lengths, "B T V", "log_probs")
    B, _, V = log_probs.shape
    blank = blank_index(blank, V)
    labels = hypotheses.labels
    dims(labels, "B N", "hypotheses", B=B)
    invalid = labels[(labels < PADDING) | (labels >= V) | (labels == blank)]
    wanted = f"labels from 0 to below V={V}, without the blank {blank}"
    expect(len(invalid) == 0, "hypotheses", wanted, invalid[:5].tolist())
    from asrkit.decoders.ctc.numba_cpu import align

    with torch.inference_mode(False), torch.no_grad():
        return Alignment(*align(log_probs, labels, hypotheses.lengths, lengths, blank))
