"""Greedy CTC, one utterance after another: the reference for `ctc_greedy`."""

from numbers import Integral

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, check_batch
from asrkit.runtime import eager
from asrkit.shapes import expect


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
        dtype = torch.promote_types(best.dtype, torch.float32)
        scores.append(best.sum(dtype=dtype))
        labels = tokens.tolist()  # the GPU waits for Python here
        rows.append(_merge_runs(labels, blank))
    return Hypotheses.from_lists(rows, scores, "sequential")


def _merge_runs(tokens: list[int], blank: int) -> list[tuple[int, int, int]]:
    """(label, first frame, frames) of each run of one token, but for the blank's."""
    starts = []
    for t, token in enumerate(tokens):
        if t == 0 or token != tokens[t - 1]:
            starts.append(t)
    ends = [*starts[1:], len(tokens)]
    runs = []
    for start, end in zip(starts, ends, strict=False):  # no tokens: no start, but an end
        label = tokens[start]
        if label != blank:
            runs.append((label, start, end - start))
    return runs


def blank_index(blank: int, V: int) -> int:
    """The index of the blank among V tokens, counted from the front; ValueError if out of range."""
    is_index = isinstance(blank, Integral) and not isinstance(blank, bool)
    fits = is_index and -V <= blank < V
    expect(fits, "blank", f"an index of V={V} tokens", blank)
    return int(blank) % V
