"""The likeliest CTC alignment of given labels to frames (Viterbi).

It says when a text was spoken that something else than CTC wrote, such as an attention decoder.
Source: Graves et al. 2006, section 4.1, with the largest in place of the sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.ctc.sequential import blank_index
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.shapes import dims, expect


class Alignment(NamedTuple):
    """Labels in time; where a text has no alignment, all of its frames and durations are -1."""

    frames: Tensor  # (B, N) int64, first frame of each label's run, padding -1
    durations: Tensor  # (B, N) int64, frames of the run, padding -1
    scores: Tensor  # (B,) log-probability in nats, float32 or float64; -inf where there is none


def ctc_alignment(
    log_probs: Tensor, lengths: Tensor, hypotheses: Hypotheses, *, blank: int = -1
) -> Alignment:
    """The likeliest alignment of each text to its frames.

    A text has none that is longer than its frames have room for, a blank between equal labels
    included, or where a frame is NaN. Memory grows with N times the root of T.

    Args:
        log_probs: (B, T, V) log-probabilities in nats, float of 16 bits or more; added up in
            float64.
        lengths: (B,) valid frames, int32 or int64; 0 is allowed.
        hypotheses: Of these B utterances; their labels are looked at alone.
        blank: Index of the blank; negative counts from the end.

    Raises:
        ValueError: The hypotheses are of another batch, or a label is none of CTC's.

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
    is_strange = (labels < PADDING) | (labels >= V) | (labels == blank)
    strange = labels[is_strange]
    wanted = f"labels from 0 to below V={V}, without the blank {blank}"
    expect(len(strange) == 0, "hypotheses", wanted, strange[:5].tolist())
    from asrkit.decoders.ctc.numba_cpu import align

    with torch.inference_mode(False), torch.no_grad():
        return Alignment(*align(log_probs, labels, hypotheses.lengths, lengths, blank))
