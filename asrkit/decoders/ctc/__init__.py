"""Greedy CTC: the best token of every frame, repeats merged, blanks dropped.

A run is a stretch of frames with the same best token. Every run of a token other than the blank is
one label: `Hypotheses.frames` has the run's first frame and `durations` its length in frames.
Source: Graves et al. 2006, section 3.2 (best path decoding).
"""

import torch
from torch import Tensor

from asrkit.compilers import JIT_OFF
from asrkit.decoders.ctc.sequential import blank_index, ctc_greedy_sequential
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.shapes import expect, expect_choice, valid_mask
from asrkit.threads import eager

__all__ = ["IMPLS", "ctc_greedy", "ctc_greedy_sequential"]

IMPLS = ("batched", "numba_cpu")
NUMBA_FROM = 1 << 20  # scores in a batch; below, importing Numba (0.5 s) costs more than it saves


@eager
def ctc_greedy(
    log_probs: Tensor, lengths: Tensor, *, blank: int = -1, impl: str = "auto"
) -> Hypotheses:
    """Greedy `Hypotheses` of a batch, without a Python loop over utterances or frames.

    Equal to `ctc_greedy_sequential`; scores up to the order of summation.

    Args:
        log_probs: (B, T, V) log-probabilities in nats, float of 16 bits or more.
        lengths: (B,) valid frames, int32 or int64; 0 is allowed.
        blank: Index of the blank; negative counts from the end.
        impl: "batched" is torch on any device. It waits for a GPU twice, to check the lengths and
            for the number of labels. "numba_cpu" finds the best tokens in one compiled pass over
            the valid frames, which is faster than torch's `max`. "auto" is "numba_cpu" for large
            batches on a CPU, else "batched".

    Raises:
        ValueError: An argument does not fit.
    """
    check_batch(log_probs, lengths, "B T V", "log_probs")
    blank = blank_index(blank, log_probs.shape[-1])
    expect_choice("impl", impl, ("auto", *IMPLS))
    on_cpu = log_probs.device.type == "cpu" and not JIT_OFF
    if impl == "auto":
        is_large = log_probs.numel() > NUMBA_FROM
        impl = "numba_cpu" if on_cpu and is_large else "batched"
    wanted = "a CPU, and Numba's compiler, with impl='numba_cpu'"
    expect(on_cpu or impl == "batched", "log_probs", wanted, log_probs.device, "Pass 'auto'.")
    with torch.inference_mode():
        if impl == "numba_cpu":
            from asrkit.decoders.ctc import numba_cpu

            best, tokens = numba_cpu.best_tokens(log_probs, lengths)  # (B, T) each
        else:
            best, tokens = log_probs.max(-1)
        valid = valid_mask(lengths, log_probs.shape[1])
        in_label = valid & (tokens != blank)
        starts_label = in_label.clone()
        starts_label[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]
        counts = starts_label.sum(1)
        N = int(counts.max())
        # the label that each frame belongs to; frames without a label go to column N
        label_of_frame = torch.where(in_label, starts_label.cumsum(1) - 1, N)
        label_started = torch.where(starts_label, label_of_frame, N)
        frames = torch.arange(valid.shape[1], device=valid.device).expand_as(tokens)
        dtype = torch.promote_types(best.dtype, torch.float32)
        scores = best.masked_fill(~valid, 0).sum(1, dtype=dtype)
    size = (len(tokens), N + 1)
    ones = torch.ones_like(label_of_frame)
    durations = tokens.new_zeros(size).scatter_add_(1, label_of_frame, ones)[:, :N]
    padding = tokens.new_full(size, PADDING)
    labels = padding.scatter(1, label_started, tokens)
    first_frames = padding.scatter(1, label_started, frames)
    return Hypotheses(
        labels=labels[:, :N],
        frames=first_frames[:, :N],
        durations=durations.masked_fill(durations == 0, PADDING),
        lengths=counts.clone(),
        scores=scores.clone(),
        impl=impl,
    )
