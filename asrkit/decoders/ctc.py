"""Greedy CTC: the best token of every frame, repeats merged, blanks dropped."""

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, Step, check
from asrkit.shapes import expect, valid_mask


def ctc_greedy(log_probs: Tensor, lengths: Tensor, *, blank: int = -1) -> Hypotheses:
    """Greedy hypotheses of log_probs (B, T, V) with lengths (B,) in frames: no loop over utterances or frames.

    A label is on the first frame of its run; its duration is the run's. Equal to `ctc_greedy_sequential`; scores up to the
    order of summation.
    """
    check(log_probs, lengths, "B T V", "log_probs")
    blank = _index(blank, log_probs.shape[-1])
    with torch.inference_mode():
        valid = valid_mask(lengths, log_probs.shape[1])  # (B, T)
        best, tokens = log_probs.max(-1)
        starts = torch.ones_like(valid)
        starts[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
        scores = best.masked_fill(~valid, 0).sum(1, dtype=torch.promote_types(best.dtype, torch.float32))
        frames = torch.arange(valid.shape[1], device=valid.device).expand_as(tokens)
        edges = torch.where(starts | ~valid, frames, valid.shape[1])  # the first frame of what follows, seen from behind
        ends = torch.nn.functional.pad(edges.flip(1).cummin(1).values.flip(1)[:, 1:], (0, 1), value=valid.shape[1])
        return Hypotheses.pack(Step(tokens, frames, ends - frames, valid & starts & (tokens != blank)), scores, "batched")


def ctc_greedy_sequential(log_probs: Tensor, lengths: Tensor, *, blank: int = -1) -> Hypotheses:
    """What `ctc_greedy` replaces: one utterance after another, runs merged in Python. The readable reference."""
    check(log_probs, lengths, "B T V", "log_probs")
    blank = _index(blank, log_probs.shape[-1])
    rows, scores = [], []
    for row, length in zip(log_probs.detach(), lengths.tolist(), strict=True):
        best, tokens = row[:length].max(-1)
        chosen = tokens.tolist()  # the GPU waits for Python here, once an utterance
        starts = [t for t in range(length) if t == 0 or chosen[t] != chosen[t - 1]]
        runs = zip(starts, [*starts[1:], length], strict=True) if starts else ()
        rows.append([(chosen[t], t, end - t) for t, end in runs if chosen[t] != blank])
        scores.append(best.sum(dtype=torch.promote_types(best.dtype, torch.float32)))
    return Hypotheses.from_lists(rows, scores, "sequential")


def _index(blank: int, V: int) -> int:
    expect(blank in range(-V, V), "blank", f"an index of V={V} tokens", blank)
    return blank % V
