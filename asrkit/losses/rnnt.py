"""The transducer (RNN-T) loss of logits that include padding."""

from typing import Literal, get_args

import torch
from torch import Tensor

from asrkit.losses import arguments
from asrkit.losses.arguments import (
    Reduction,
    check_lengths,
    check_options,
    check_scores,
    choose,
    reduce,
)
from asrkit.losses.gradient import lattice_loss
from asrkit.losses.lattice import LatticeOptions, Nodes
from asrkit.shapes import dims, expect
from asrkit.threads import eager

TORCHAUDIO = "torch 2.11 needs torchaudio 2.11.0; torch 2.13 and later need 2.11.1."
Impl = Literal[arguments.Impl, "torchaudio"]
IMPLS = get_args(Impl)[1:]  # files of asrkit.losses, and torchaudio's compiled loss


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

    It is a drop-in replacement for torchaudio.functional.rnnt_loss, which has the same positional
    arguments. Padding may hold anything. If the logits rule the targets out (-inf on every path),
    the loss of the utterance is inf, as are the mean and the sum of its batch, and its gradient is
    0. Under torch.compile the loss is a graph break. Second derivatives and torch.func are not
    supported.

    Source: A. Graves, arXiv 1211.3711, sections 2.4 and 2.5.

    Args:
        logits: (B, T, U1, V), floating point; copied if they are not contiguous.
        targets: Labels (B, U), int32 or int64. Targets and both lengths may be on the logits'
            device or on the host. On the host they are checked without waiting for a GPU.
        logit_lengths: Frames of each utterance, (B,).
        target_lengths: Labels of each utterance, (B,).
        blank: Index of the blank token, -V to V - 1.
        clamp: If > 0, limits each element of the gradient of an utterance's loss to +-clamp.
        reduction: "mean" or "sum" over the batch, or "none".
        fused_log_softmax: False if `logits` are log-probabilities.
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda (FastEmit, arXiv
            2010.11148). The loss stays the negative log-likelihood; NeMo 3.0 and warprnnt_numba 0.4
            scale the returned loss as well.
        overwrite_logits: Write the gradient over the logits, which saves a second B T U1 V tensor.
            Backward then destroys the logits. A second backward through the same graph raises an
            error, and so does the backward of another function that saved the logits.
        impl: The implementation; "auto" chooses the fastest for the device and dtype.

    Returns:
        A scalar, or (B,) with reduction="none". Losses of half-precision logits are float32.

    Raises:
        ValueError: An argument does not fit; the message names it and a remedy.

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
    chosen = choose(impl, IMPLS, logits, overwrite_logits)
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
    )
    if chosen == "torchaudio":
        costs = _torchaudio_loss(logits, targets, lengths, options)
    else:
        costs = lattice_loss(chosen, logits, targets, Nodes.padded(logits, lengths), options)
    return reduce(costs, reduction)


def _torchaudio_loss(
    logits: Tensor, targets: Tensor, lengths: Tensor, options: LatticeOptions
) -> Tensor:
    """Return the losses (B,) of torchaudio's kernel, which needs memory for 2 B T U1 V numbers.

    `lengths` (B, 2) are on the host.
    """
    try:
        from torchaudio.functional import rnnt_loss as peer
    except (ImportError, OSError) as error:
        wanted = f"a torchaudio that loads with torch {torch.__version__}"
        expect(False, "impl", wanted, error, f"{TORCHAUDIO} Or pass another impl.")
    remedy = "Pass impl='wavefront'."
    factor = options.fastemit_lambda
    expect(factor == 0, "fastemit_lambda", "0 with impl='torchaudio'", factor, remedy)
    # its offsets have 32 bits; larger logits make it access wrong memory (pytorch/audio 3736)
    wanted = "fewer than 2^31 elements with impl='torchaudio'"
    expect(logits.numel() < 2**31, "logits", wanted, logits.numel(), remedy)
    T, U = lengths.amax(0).tolist()  # it rejects tensors longer than their longest utterance
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
