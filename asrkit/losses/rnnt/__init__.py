"""The transducer (RNN-T) loss: check the arguments, pick an implementation, reduce."""

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
# modules of this folder, each with `losses(logits, targets, nodes, options)`
IMPLS = ("reference", "wavefront", "numba_cpu", "numba_cuda", "triton", "torchaudio")


def resolve(
    impl: Impl, logits: Tensor, *, fastemit_lambda: float = 0.0, overwrite_logits: bool = False
) -> str:
    """Name of the implementation that `rnnt_loss` runs for these arguments.

    Args:
        impl: the caller's choice.
        logits: (B, T, U1, V).
        fastemit_lambda: as in `rnnt_loss`.
        overwrite_logits: as in `rnnt_loss`.

    Raises:
        ValueError: an implementation that was named cannot run.
    """
    picked = pick(impl, IMPLS, logits, overwrite_logits)
    if picked == "torchaudio":
        _expect_torchaudio_runs(logits, fastemit_lambda)
    return picked


def _expect_torchaudio_runs(logits: Tensor, fastemit_lambda: float) -> None:
    remedy = "Pass impl='wavefront'."
    runs = logits.dtype in (torch.float32, torch.float16)
    expect(runs, "logits", "float32 or float16 with impl='torchaudio'", logits.dtype, remedy)
    wanted = "0 with impl='torchaudio'"
    expect(fastemit_lambda == 0, "fastemit_lambda", wanted, fastemit_lambda, remedy)
    # its offsets have 32 bits: beyond, it reads and writes elsewhere (pytorch/audio 3736)
    wanted = "fewer than 2^31 elements with impl='torchaudio'"
    expect(logits.numel() < 2**31, "logits", wanted, logits.numel(), remedy)


@eager
def rnnt_loss(  # noqa: PLR0913 - the positional part is torchaudio's signature
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
    """Negative log-likelihood of the targets in nats (RNN-T loss), float32 or float64.

    A drop-in for torchaudio.functional.rnnt_loss, whose arguments are the positional ones here.
    Padding may hold anything. Targets that the logits rule out (-inf on every path) cost inf, and
    so do then the mean and the sum of their batch; they have no gradient. Under torch.compile the
    loss is a graph break. It has no second derivative and no torch.func.

    Source: A. Graves, arXiv 1211.3711, sections 2.4 and 2.5.

    Args:
        logits: (B, T, U1, V), floating point.
        targets: labels (B, U), int32 or int64. These and both lengths lie on the logits' device,
            or on the host, where checking them waits for no GPU.
        logit_lengths: frames of each utterance, (B,).
        target_lengths: labels of each utterance, (B,).
        blank: index of the blank token, -V to V - 1.
        clamp: limits each element of the gradient of an utterance's loss to +-clamp, if > 0.
        reduction: "mean" or "sum" over the batch, or "none".
        fused_log_softmax: False if `logits` are log-probabilities.
        fastemit_lambda: scales the gradient of label arcs by 1 + lambda (FastEmit, arXiv
            2010.11148). The loss stays the negative log-likelihood; NeMo 3.0 and warprnnt_numba 0.4
            scale the loss that they return as well.
        overwrite_logits: write the gradient over the logits instead of beside them, which saves a
            second B T U1 V tensor. The logits are gone after backward; a second backward through
            the same graph is refused, and so is one of another function that saved the logits.
        impl: the implementation; "auto" takes the fastest that is known to be.

    Returns:
        A scalar, or (B,) with reduction="none". Losses of half-precision logits are float32.

    Raises:
        ValueError: an argument does not fit; the message names it and a remedy.

    >>> logits, targets = torch.zeros(1, 2, 2, 3), torch.tensor([[0]])
    >>> rnnt_loss(logits, targets, torch.tensor([2]), torch.tensor([1]))  # log(27 / 2)
    tensor(2.6027)
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
    losses = import_module(f"{__name__}.{picked}").losses
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
    )
    nodes = Nodes.padded(logits, lengths)
    return reduce(losses(logits, as_index(targets, logits.device), nodes, options), reduction)
