"""What batched greedy CTC replaces, and is tested against."""

from numbers import Integral

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, check
from asrkit.runtime import eager
from asrkit.shapes import expect


@eager
def ctc_greedy_sequential(log_probs: Tensor, lengths: Tensor, *, blank: int = -1) -> Hypotheses:
    """What `ctc_greedy` replaces: one utterance after another, runs merged in Python. The readable
    reference.
    """
    check(log_probs, lengths, "B T V", "log_probs")
    blank = blank_index(blank, log_probs.shape[-1])
    rows, scores = [], []
    for row, length in zip(log_probs.detach(), lengths.tolist(), strict=True):
        best, tokens = row[:length].max(-1)
        chosen = tokens.tolist()  # the GPU waits for Python here, once an utterance
        starts = [t for t in range(length) if t == 0 or chosen[t] != chosen[t - 1]]
        runs = zip(starts, [*starts[1:], length], strict=True) if starts else ()
        rows.append([(chosen[t], t, end - t) for t, end in runs if chosen[t] != blank])
        scores.append(best.sum(dtype=torch.promote_types(best.dtype, torch.float32)))
    return Hypotheses.from_lists(rows, scores, "sequential")


def blank_index(blank: int, V: int) -> int:
    """The index of the blank among V tokens, counted from the front."""
    whole = isinstance(blank, Integral) and not isinstance(blank, bool)
    expect(whole and -V <= blank < V, "blank", f"an index of V={V} tokens", blank)
    return int(blank) % V
