"""Packed lattices: the joint's hidden layer, logits and loss of the N = sum of T (U + 1) valid
nodes only.

Padding is neither made, multiplied nor read: on a batch of unequal lengths N is well below B T U1.
Rows are ordered by utterance, then frame, so utterance b owns the rows from packed_offsets(...)[b]
to packed_offsets(...)[b + 1], a lattice of T (U + 1) rows.

Peer: apex.contrib.transducer, TransducerJoint(pack_output=True) and
TransducerLoss(packed_input=True), CUDA only, as in NVIDIA's submission to MLPerf Training v1.0.
They take the rows' offsets as an argument; here they follow from the lengths.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from asrkit.losses import rnnt
from asrkit.losses.choice import pick
from asrkit.losses.gradient import check_backward, lattice_loss
from asrkit.losses.lattice import (
    LatticeOptions,
    Nodes,
    Reduction,
    check_halves,
    check_lengths,
    check_options,
    check_scores,
    reduce,
)
from asrkit.shapes import dims, expect, expect_choice
from asrkit.threads import eager

CPU_TILE_BYTES = 1 << 20  # what backward takes at once, which fits a core's cache
GPU_TILE_BYTES = 1 << 26
Activation = Literal["none", "relu", "tanh"]
Impl = Literal["auto", "reference", "wavefront", "numba_cpu", "triton"]
IMPLS = tuple(impl for impl in rnnt.IMPLS if impl != "torchaudio")  # which takes padded logits only


def packed_offsets(logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """First row of each utterance, and N at the end: int64 (B + 1,), from lengths (B,).

    >>> packed_offsets(torch.tensor([2, 3]), torch.tensor([1, 0]))
    tensor([0, 4, 7])
    """
    sizes = logit_lengths.long() * (target_lengths.long() + 1)
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


@eager
def pack_joint(
    encoded: Tensor,
    predicted: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    activation: Activation = "none",
) -> Tensor:
    """activation(encoded[b, t] + predicted[b, u]) of all valid nodes (b, t, u): (N, D).

    Padding may hold anything and has gradient 0. Backward reads the result, which must stay
    unchanged. Memory: the result, N D, and small tiles. Second derivatives are refused.

    Args:
        encoded: (B, T, D), the encoder's half of the joint, projected.
        predicted: (B, U1, D), the predictor's half, of the same dtype.
        logit_lengths: frames (B,).
        target_lengths: labels (B,).
        activation: "none", "relu" or "tanh".

    >>> lengths = torch.tensor([2, 1]), torch.tensor([1, 0])
    >>> pack_joint(torch.ones(2, 2, 8), torch.ones(2, 2, 8), *lengths, activation="relu").shape
    torch.Size([5, 8])
    """
    expect_choice("activation", activation, get_args(Activation))
    B, T, U1, D = check_halves(encoded, predicted)
    # any labels will do, since only the lengths are checked
    labels = torch.zeros((B, U1 - 1), dtype=torch.int64, device=target_lengths.device)
    lengths = check_lengths(
        labels, logit_lengths, target_lengths, -1, like=encoded, T=T, U1=U1, V=2
    )
    return PackedJoint.apply(encoded, predicted, Nodes.packed(lengths, D), activation)


class PackedJoint(torch.autograd.Function):
    """pack_joint of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any, encoded: Tensor, predicted: Tensor, nodes: Nodes, activation: Activation
    ) -> Tensor:
        """(N, D); see `pack_joint`. `ctx` keeps what backward needs."""
        out = encoded.new_empty(nodes.count, encoded.shape[2])
        for b in range(len(encoded)):
            T, U1, rows = nodes.slices(b)
            grid = out[rows].unflatten(0, (T, U1))
            torch.add(encoded[b, :T, None], predicted[b, :U1], out=grid)
            if activation == "relu":
                grid.relu_()
            elif activation == "tanh":
                grid.tanh_()
        ctx.save_for_backward(out)
        ctx.rest = nodes, activation, (encoded.shape, predicted.shape)
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        check_backward(incoming[0])
        (out,) = ctx.saved_tensors
        nodes, activation, shapes = ctx.rest
        (by_out,) = incoming
        wide = torch.promote_types(by_out.dtype, torch.float32)
        by_encoded, by_predicted = (by_out.new_zeros(shape, dtype=wide) for shape in shapes)
        tile_bytes = CPU_TILE_BYTES if out.device.type == "cpu" else GPU_TILE_BYTES
        for b in range(len(by_encoded)):
            T, U1, rows = nodes.slices(b)
            step = max(1, tile_bytes // (wide.itemsize * U1 * out.shape[1]))  # frames of a tile
            grads = by_out[rows].unflatten(0, (T, U1)).split(step)
            outputs = out[rows].unflatten(0, (T, U1)).split(step)
            by_frames = by_encoded[b, :T].split(step)
            for grad, y, sums in zip(grads, outputs, by_frames, strict=True):
                by_total = grad.to(wide)
                if activation == "tanh":
                    by_total = by_total * (1 - y.to(wide).square())
                elif activation == "relu":
                    by_total = by_total.masked_fill(y <= 0, 0)
                sums.copy_(by_total.sum(1))
                by_predicted[b, :U1] += by_total.sum(0)
        return by_encoded.to(by_out.dtype), by_predicted.to(by_out.dtype), None, None


@eager
def rnnt_loss_packed(  # noqa: PLR0913 - as many arguments as rnnt_loss
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
    """rnnt_loss of packed logits (N, V): the same loss in nats, without the padding.

    Memory beside the logits: their gradient, N V, and lattices; with overwrite_logits=True the
    lattices only. The notes on rnnt_loss hold.

    Args:
        logits: (N, V), ordered as by `pack_joint`.
        targets: labels (B, U), padded, int32 or int64.
        logit_lengths: frames (B,).
        target_lengths: labels (B,).
        blank: index of the blank.
        clamp: limit of each element of the gradient of an utterance's loss; none if <= 0.
        reduction: "mean" or "sum" over the batch, or "none".
        fused_log_softmax: False if `logits` are log-probabilities.
        fastemit_lambda: FastEmit's factor of the label arcs' gradient is 1 + this.
        overwrite_logits: write the gradient over the logits.
        impl: the implementation; "auto" takes the fastest that is known to be.

    Returns:
        A scalar, or (B,) with reduction="none".

    >>> logits, targets = torch.zeros(4, 3), torch.tensor([[0]])
    >>> rnnt_loss_packed(logits, targets, torch.tensor([2]), torch.tensor([1]))  # log(27 / 2)
    tensor(2.6027)
    """
    check_options(reduction, clamp, fastemit_lambda)
    N, V = dims(logits, "N V", "logits")
    check_scores(logits, "logits")
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, blank, like=logits, T=None, U1=None, V=V
    )
    nodes = Nodes.packed(lengths, V)
    remedy = "Pack with the lengths that the loss is given."
    expect(nodes.count == N, "logits", f"N={nodes.count} rows, the sum of T (U + 1)", N, remedy)
    picked = pick(impl, IMPLS, logits, overwrite_logits)
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
    )
    return reduce(lattice_loss(picked, logits, targets, nodes, options), reduction)
