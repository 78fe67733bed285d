"""The door to the transducer (RNN-T) loss: check once, pick an implementation, reduce."""

from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from asrkit.losses.availability import pick
from asrkit.losses.checks import (
    Reduction,
    as_index,
    check_lengths,
    check_options,
    check_scores,
    reduce,
)
from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.runtime import eager
from asrkit.shapes import dims, expect

Impl = Literal["auto", "reference", "wavefront", "numba_cpu", "numba_cuda", "triton", "torchaudio"]
IMPLS = (
    "reference",
    "wavefront",
    "numba_cpu",
    "numba_cuda",
    "triton",
    "torchaudio",
)  # modules of this folder, each with `losses`


def resolve(
    impl: Impl, logits: Tensor, *, fastemit_lambda: float = 0.0, overwrite_logits: bool = False
) -> str:
    """Name of the implementation that `rnnt_loss` runs for these arguments; ValueError where a
    named one cannot run.
    """
    picked = pick(impl, IMPLS, logits, overwrite_logits)
    if picked == "torchaudio":
        ok, remedy = logits.dtype in (torch.float32, torch.float16), "Pass impl='wavefront'."
        expect(ok, "logits", "float32 or float16 with impl='torchaudio'", logits.dtype, remedy)
        expect(
            fastemit_lambda == 0,
            "fastemit_lambda",
            "0 with impl='torchaudio'",
            fastemit_lambda,
            remedy,
        )
        fits = (
            logits.numel() < 2**31
        )  # its offsets have 32 bits: beyond, it reads and writes elsewhere (pytorch/audio 3736)
        expect(
            fits,
            "logits",
            "fewer than 2^31 elements with impl='torchaudio'",
            logits.numel(),
            remedy,
        )
    return picked


@eager
def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
    clamp: float = -1,
    reduction: Reduction = "mean",
    fused_log_softmax: bool = True,
    *,
    fastemit_lambda: float = 0.0,
    overwrite_logits: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Negative log-likelihood of the targets in nats: its mean or sum over the batch, or one per
    utterance, (B,).

    The positional part is torchaudio.functional.rnnt_loss's (hence eleven parameters), so this
    drops in for it. logits (B, T, U1, V), or log-probabilities with fused_log_softmax=False;
    targets (B, U) and lengths (B,), in frames and labels, int32 or int64 on the logits' device.
    Padding may hold anything. clamp > 0 limits each gradient of an utterance's loss to +-clamp.
    Losses are float32 (float64 for float64).

    Targets that the logits rule out (-inf on every path) cost inf, and so do then the mean and the
    sum of their batch; they have no gradient.

    fastemit_lambda scales the gradient of label arcs by 1 + lambda (FastEmit, arXiv 2010.11148).
    The loss stays the negative log-likelihood; NeMo 3.0 and warprnnt_numba 0.4 scale the same
    gradient, and the loss they return by 1 + lambda too. overwrite_logits writes the gradient over
    the logits instead of beside them (no second B T U1 V tensor): the logits are gone after
    backward, a second backward through the same graph is refused, and so is one of another function
    that saved the logits. Under torch.compile the loss is a graph break. It has no second
    derivative and no torch.func.

    >>> rnnt_loss(torch.zeros(1, 2, 2, 3), torch.tensor([[0]]), torch.tensor([2]),
    torch.tensor([1]))  # log(27 / 2) tensor(2.6027)
    """
    check_options(reduction, clamp, fastemit_lambda)
    _, T, U1, V = dims(logits, "B T U1 V", "logits")
    check_scores(logits, "logits")
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, blank, like=logits, T=T, U1=U1, V=V
    )
    picked = resolve(
        impl, logits, fastemit_lambda=fastemit_lambda, overwrite_logits=overwrite_logits
    )
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
    )
    run = import_module(f"{__name__}.{picked}").losses
    return reduce(run(logits, as_index(targets), Nodes.padded(logits, lengths), options), reduction)
