"""Greedy CTC: the best token of every frame, repeats merged, blanks dropped. The batch at once,
beside one by one.

A run is the frames on which one token stays the best. A label stands for each run but those of the
blank: `frames` has the run's first frame and `durations` how many it has. The source is Graves et
al. 2006, section 3.2 (best path decoding).
"""

import torch
from torch import Tensor

from asrkit.decoders.ctc.sequential import blank_index, ctc_greedy_sequential
from asrkit.decoders.hypotheses import Hypotheses, check
from asrkit.runtime import eager
from asrkit.shapes import expect, valid_mask

__all__ = ["IMPLS", "ctc_greedy", "ctc_greedy_sequential"]

IMPLS = ("batched", "numba_cpu")


@eager
def ctc_greedy(
    log_probs: Tensor, lengths: Tensor, *, blank: int = -1, impl: str = "auto"
) -> Hypotheses:
    """Greedy hypotheses of log_probs (B, T, V) with lengths (B,) in frames: no Python work an
    utterance or a frame.

    `impl="batched"` is torch throughout, on any device: two waits for a GPU, one to check the
    lengths and one for the number of labels. `"numba_cpu"` finds the best tokens in one compiled
    pass over the frames that hold speech, which torch's `max` takes longer for; "auto" picks it on
    a CPU. Equal to `ctc_greedy_sequential`, scores up to the order of summation.
    """
    check(log_probs, lengths, "B T V", "log_probs")
    blank, picked = blank_index(blank, log_probs.shape[-1]), _pick(impl, log_probs)
    with torch.inference_mode():
        best, tokens = _best(log_probs, lengths, picked)  # (B, T) each
        valid = valid_mask(lengths, log_probs.shape[1])
        spoken = valid & (tokens != blank)
        first = spoken.clone()  # frames that a run of labels begins on
        first[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]
        counts = first.sum(1)
        N = int(counts.max())
        run = torch.where(
            spoken, first.cumsum(1) - 1, N
        )  # which label a frame belongs to; column N takes what is dropped
        start = torch.where(first, run, N)
        frames = torch.arange(valid.shape[1], device=valid.device).expand_as(tokens)
        scores = best.masked_fill(~valid, 0).sum(
            1, dtype=torch.promote_types(best.dtype, torch.float32)
        )
    held = tokens.new_zeros(len(tokens), N + 1).scatter_add_(1, run, torch.ones_like(run))[:, :N]
    return Hypotheses(
        labels=tokens.new_full((len(tokens), N + 1), -1).scatter_(1, start, tokens)[:, :N],
        frames=tokens.new_full((len(tokens), N + 1), -1).scatter_(1, start, frames)[:, :N],
        durations=held.masked_fill(held == 0, -1),
        lengths=counts.clone(),
        scores=scores.clone(),
        impl=picked,
    )


def _best(log_probs: Tensor, lengths: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """Log-probability and index of each frame's best token, the first of equals: (B, T). Padding:
    anything.
    """
    if impl == "batched":
        best, tokens = log_probs.max(-1)
        return best, tokens
    from asrkit.decoders.ctc import numba_cpu

    return numba_cpu.best_tokens(log_probs, lengths)


def _pick(impl: str, log_probs: Tensor) -> str:
    expect(
        impl in ("auto", *IMPLS),
        "impl",
        "one of 'auto', " + ", ".join(map(repr, IMPLS)),
        repr(impl),
    )
    able = log_probs.device.type == "cpu" and log_probs.dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
    got = f"{log_probs.dtype} on {log_probs.device}"
    expect(
        able or impl != "numba_cpu",
        "log_probs",
        "a CPU tensor of 16 to 64 bits with impl='numba_cpu'",
        got,
        "Pass 'auto'.",
    )
    return impl if impl != "auto" else "numba_cpu" if able else "batched"
