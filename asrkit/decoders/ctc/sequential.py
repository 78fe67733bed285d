"""Greedy CTC, one utterance after another: the reference for `ctc_greedy`."""

from itertools import groupby

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, check_batch
from asrkit.shapes import expect, whole
from asrkit.threads import eager


@eager
def ctc_greedy_sequential(log_probs: Tensor, lengths: Tensor, *, blank: int = -1) -> Hypotheses:
    """Greedy `Hypotheses`, with runs merged in Python: the readable reference of `ctc_greedy`.

    Args:
        log_probs: (B, T, V) log-probabilities in nats.
        lengths: (B,) valid frames.
        blank: Index of the blank; negative counts from the end.
    """
    check_batch(log_probs, lengths, "B T V", "log_probs")
    blank = blank_index(blank, log_probs.shape[-1])
    rows = []
    scores = []
    for row, length in zip(log_probs.detach(), lengths.tolist(), strict=True):
        best, tokens = row[:length].max(-1)
        scores.append(best.sum(dtype=torch.promote_types(best.dtype, torch.float32)))
        labels = []
        start = 0
        for label, run in groupby(tokens.tolist()):  # the host waits for a GPU here
            frames = len([*run])
            if label != blank:
                labels.append((label, start, frames))
            start += frames
        rows.append(labels)
    return Hypotheses.from_lists(rows, scores, "sequential")


def blank_index(blank: int, V: int) -> int:
    """The index of the blank among V tokens, from 0; ValueError if it is out of range."""
    expect(whole(blank, -V, V - 1), "blank", f"an index of V={V} tokens", blank)
    return blank % V
