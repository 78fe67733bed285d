"""Packed lattices: hidden layer, logits and loss for the N = sum of T (U + 1) valid nodes only.

"Packed" means without padding. Padding is neither allocated, multiplied nor read: in a batch of
unequal lengths N is well below B T U1. Rows are ordered by utterance, then by frame. The rows from
packed_offsets(...)[b] to packed_offsets(...)[b + 1] are the lattice of utterance b, T (U + 1) rows.

Peer: apex.contrib.transducer, TransducerJoint(pack_output=True) and
TransducerLoss(packed_input=True), for CUDA only, as in NVIDIA's submission to MLPerf Training v1.0.
They take the rows' offsets as an argument; here the offsets follow from the lengths.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from asrkit.devices import autocast
from asrkit.losses import lean
from asrkit.losses.arguments import (
    IMPLS,
    Impl,
    Reduction,
    as_index,
    check_halves,
    check_lengths,
    check_options,
    check_scores,
    choose,
    reduce,
)
from asrkit.losses.gradient import check_backward, lattice_loss
from asrkit.losses.lattice import LatticeOptions, Nodes
from asrkit.losses.lean.driver import Activation, Joint, NodeTiles
from asrkit.shapes import dims, expect, expect_choice
from asrkit.threads import eager


def packed_offsets(logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """Return the first row of each utterance, then N: int64 (B + 1,), from lengths (B,).

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
    dropout: float = 0.0,
    seed: int | None = None,
    impl: lean.Impl = "auto",
) -> Tensor:
    """Return dropout(activation(encoded[b, t] + predicted[b, u])) of all valid nodes: (N, D).

    Padding may hold anything and has gradient 0. Do not change the result, because backward reads
    it. Memory: the result, N D, and small tiles. Second derivatives are not supported. The kernels
    are those of `rnnt_loss_lean`, and so is the mask of the same seed.

    Args:
        encoded: The encoder's half of the joint, projected: (B, T, D).
        predicted: The predictor's half, projected, in the same dtype: (B, U1, D).
        logit_lengths: Frames (B,).
        target_lengths: Labels (B,).
        activation: "none", "relu" or "tanh".
        dropout: Probability that an element is dropped; the others are divided by 1 - dropout. The
            mask is a hash of seed, utterance, node and column, which backward computes again.
        seed: Seed of that mask, 32 bits; None draws one from torch's default generator.
        impl: "plain" (torch), "numba_cpu", "triton", or "auto", as in `rnnt_loss_lean`.

    Raises:
        ValueError: Arguments that do not fit together, or an `impl` that cannot run here.

    >>> lengths = torch.tensor([2, 1]), torch.tensor([1, 0])
    >>> pack_joint(torch.ones(2, 2, 8), torch.ones(2, 2, 8), *lengths, activation="relu").shape
    torch.Size([5, 8])
    """
    expect_choice("activation", activation, get_args(Activation))
    B, T, U1, D = check_halves(encoded, predicted)
    # only the lengths matter here, so the labels are all 0
    labels = torch.zeros((B, U1 - 1), dtype=torch.int64, device=target_lengths.device)
    lengths = check_lengths(
        labels, logit_lengths, target_lengths, -1, like=encoded, T=T, U1=U1, V=2
    )
    tiles = lean.tiles(lean.choose_tiles(impl, encoded, encoded))
    joint = Joint(activation=activation, dropout=dropout, seed=seed)
    with autocast(encoded.device.type), torch.cuda.device_of(encoded):
        on_device = as_index(labels, encoded.device)
        nodes = Nodes.packed(lengths, D)
        return PackedJoint.apply(encoded, predicted, on_device, nodes, joint, tiles)


class PackedJoint(torch.autograd.Function):
    """pack_joint of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        encoded: Tensor,
        predicted: Tensor,
        labels: Tensor,
        nodes: Nodes,
        joint: Joint,
        make_tiles: type[NodeTiles],
    ) -> Tensor:
        """Return (N, D); see `pack_joint`. `ctx` saves what backward needs."""
        D = encoded.shape[2]
        out = encoded.new_empty(nodes.count, D)
        no_output = (encoded.new_empty(0, D), encoded.new_empty(0))  # no token: no weight, no bias
        rest = (*no_output, labels, nodes, LatticeOptions(blank=0), joint)
        make_tiles(encoded, predicted, *rest).hidden_layer(out)
        ctx.save_for_backward(encoded, predicted, out)
        ctx.rest = rest, make_tiles
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        check_backward(incoming[0])
        encoded, predicted, out = ctx.saved_tensors
        rest, make_tiles = ctx.rest
        tiles = make_tiles(encoded, predicted, *rest)
        sums = tiles.halves_gradients(out, incoming[0].contiguous())
        halves = (encoded, predicted)
        gradients = [total.view_as(half) for total, half in zip(sums, halves, strict=True)]
        return *(total.to(out.dtype) for total in gradients), *[None] * 4


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
    """Return the RNN-T loss in nats of packed logits (N, V): the value of `rnnt_loss`.

    Memory in addition to the logits: their gradient, N V, and the lattices; with
    overwrite_logits=True only the lattices. The notes on `rnnt_loss` apply.

    Args:
        logits: (N, V), in the order of `pack_joint`.
        targets: Labels (B, U), padded, int32 or int64.
        logit_lengths: Frames (B,).
        target_lengths: Labels (B,).
        blank: Index of blank.
        clamp: If > 0, limits each element of the gradient of an utterance's loss to +-clamp.
        reduction: "mean" or "sum" over the batch, or "none".
        fused_log_softmax: False if `logits` are log-probabilities.
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda, as in `rnnt_loss`.
        overwrite_logits: Write the gradient over the logits, as in `rnnt_loss`.
        impl: The implementation; "auto" chooses the fastest for the device and dtype.

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
    remedy = "Pass the lengths that the joint was packed with."
    expect(nodes.count == N, "logits", f"N={nodes.count} rows, the sum of T (U + 1)", N, remedy)
    chosen = choose(impl, IMPLS, logits, overwrite_logits)
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
    )
    return reduce(lattice_loss(chosen, logits, targets, nodes, options), reduction)
