"""The transducer (RNN-T) loss: arguments checked, an implementation picked, the batch reduced."""

from typing import Literal, get_args

import torch
from torch import Tensor

from asrkit.losses.choice import pick
from asrkit.losses.gradient import lattice_loss
from asrkit.losses.lattice import (
    LatticeOptions,
    Nodes,
    Reduction,
    check_lengths,
    check_options,
    check_scores,
    reduce,
)
from asrkit.shapes import dims, expect
from asrkit.threads import eager

TORCHAUDIO = "torch 2.11 takes torchaudio 2.11.0; torch 2.13 and later take 2.11.1."
Impl = Literal["auto", "reference", "wavefront", "numba_cpu", "triton", "torchaudio"]
# files of asrkit.losses, but for the peer, torchaudio's compiled loss
IMPLS = get_args(Impl)[1:]


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
        logits: (B, T, U1, V), floating point; copied if they are not contiguous.
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
    picked = pick(impl, IMPLS, logits, overwrite_logits)
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
    )
    if picked == "torchaudio":
        costs = _torchaudio_loss(logits, targets, lengths, options)
    else:
        costs = lattice_loss(picked, logits, targets, Nodes.padded(logits, lengths), options)
    return reduce(costs, reduction)


def _torchaudio_loss(
    logits: Tensor, targets: Tensor, lengths: Tensor, options: LatticeOptions
) -> Tensor:
    """Losses (B,) by torchaudio, in 2 B T U1 V of memory; `lengths` (B, 2) on the host."""
    try:
        from torchaudio.functional import rnnt_loss as peer
    except (ImportError, OSError) as error:
        wanted = f"a torchaudio that loads with torch {torch.__version__}"
        expect(False, "impl", wanted, error, f"{TORCHAUDIO} Or pass another impl.")
    remedy = "Pass impl='wavefront'."
    factor = options.fastemit_lambda
    expect(factor == 0, "fastemit_lambda", "0 with impl='torchaudio'", factor, remedy)
    # its offsets have 32 bits: beyond, it reads and writes elsewhere (pytorch/audio 3736)
    wanted = "fewer than 2^31 elements with impl='torchaudio'"
    expect(logits.numel() < 2**31, "logits", wanted, logits.numel(), remedy)
    T, U = lengths.amax(0).tolist()  # it refuses tensors longer than their longest utterance
    integers = (targets[:, :U], *lengths.unbind(1))
    costs = peer(
        logits[:, :T, : U + 1].contiguous(),
        *(tensor.to(logits.device, torch.int32).contiguous() for tensor in integers),
        options.blank,
        options.clamp,
        "none",
        options.fused_log_softmax,
    )
    return costs.to(torch.promote_types(costs.dtype, torch.float32))
