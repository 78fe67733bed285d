"""Packed lattices: the joint's hidden layer, logits and loss of valid nodes only, N = sum of T (U +
1) rows.

Padding is neither made, multiplied nor read: on a batch of unequal lengths N is well below B T U1.
LogitRows lie utterance after utterance, frame after frame, so utterance b owns rows
packed_offsets(...)[b : b + 2], a lattice of (T, U + 1) rows.
Peer: apex.contrib.transducer, TransducerJoint(pack_output=True) and
TransducerLoss(packed_input=True), CUDA only, as in NVIDIA's submission to MLPerf Training v1.0.
They take the rows' offsets as an argument; here lengths say it all.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from asrkit.losses import rnnt
from asrkit.losses.availability import pick
from asrkit.losses.checks import (
    Reduction,
    as_index,
    check_lengths,
    check_options,
    check_scores,
    reduce,
)
from asrkit.losses.gradient import refuse_second_derivative
from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.runtime import eager
from asrkit.shapes import dims, expect

Activation = Literal["none", "relu", "tanh"]
Impl = Literal["auto", "reference", "wavefront", "numba_cpu", "numba_cuda", "triton"]
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
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """dropout(activation(encoded[b, t] + predicted[b, u])) of all valid nodes (b, t, u): (N, D).

    encoded (B, T, D) and predicted (B, U1, D) are the halves of the joint, projected, of one dtype;
    lengths (B,) count frames and labels. Padding may hold anything and has gradient 0. Backward
    reads the result, which must stay as it is, and makes the dropout mask again from `seed`
    (asrkit.losses.dropout; drawn from torch.manual_seed's generator if None).
    Memory: the result, N D, and small tiles. Second derivatives are refused.

    >>> lengths = torch.tensor([2, 1]), torch.tensor([1, 0])
    >>> pack_joint(torch.ones(2, 2, 8), torch.ones(2, 2, 8), *lengths, activation="relu").shape
    torch.Size([5, 8])
    """
    expect(
        activation in ("none", "relu", "tanh"),
        "activation",
        "'none', 'relu' or 'tanh'",
        repr(activation),
    )
    B, _, D = dims(encoded, "B T D", "encoded")
    dims(predicted, "B U1 D", "predicted", B=B, D=D)
    lengths = check_halves(encoded, predicted, logit_lengths, target_lengths)
    expect(
        predicted.dtype == encoded.dtype,
        "predicted",
        f"{encoded.dtype}, as encoded",
        predicted.dtype,
    )
    if dropout:
        from asrkit.losses.dropout import threshold  # brings Numba along

        threshold(dropout)
        expect(seed is None or isinstance(seed, int), "seed", "an integer", seed)
        seed = int(torch.randint(2**31, ())) if seed is None else seed
    return PackedJoint.apply(
        encoded, predicted, Nodes.packed(lengths, D), activation, dropout, seed
    )


def check_halves(
    encoded: Tensor, predicted: Tensor, logit_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Frames and labels of each utterance, on the host, int64 (B, 2); ValueError for halves of a
    joint they do not fit.
    """
    B, T, _ = dims(encoded, "B T D", "encoded")
    _, U1, _ = dims(predicted, "B U1 D", "predicted", B=B)
    for name, half in {"encoded": encoded, "predicted": predicted}.items():
        check_scores(half, name)
        expect(
            half.device == encoded.device,
            name,
            f"a tensor on {encoded.device}, as encoded",
            half.device,
        )
    labels = torch.zeros(
        (B, U1 - 1), dtype=torch.int64, device=encoded.device
    )  # any will do: lengths alone are asked about
    return check_lengths(labels, logit_lengths, target_lengths, -1, like=encoded, T=T, U1=U1, V=2)


class PackedJoint(torch.autograd.Function):
    """pack_joint of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        encoded: Tensor,
        predicted: Tensor,
        nodes: Nodes,
        activation: Activation,
        dropout: float,
        seed: int,
    ) -> Tensor:
        out = encoded.new_empty(nodes.count, encoded.shape[2])
        for b, frames, U1, where in _tiles(nodes, out):
            tile = out[where]
            torch.add(encoded[b, frames, None], predicted[b, :U1], out=tile.unflatten(0, (-1, U1)))
            if activation != "none":
                (tile.relu_ if activation == "relu" else tile.tanh_)()
            if dropout:
                tile.masked_fill_(_dropped(tile, b, frames, U1, dropout, seed), 0).mul_(
                    1 / (1 - dropout)
                )
        ctx.save_for_backward(out if activation != "none" else None)
        ctx.rest = nodes, activation, dropout, seed, (encoded.shape, predicted.shape)
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        refuse_second_derivative()
        (out,), (nodes, activation, dropout, seed, shapes) = ctx.saved_tensors, ctx.rest
        wide = torch.promote_types(incoming[0].dtype, torch.float32)
        by_encoded, by_predicted = (incoming[0].new_zeros(shape, dtype=wide) for shape in shapes)
        for b, frames, U1, where in _tiles(nodes, incoming[0]):
            grad = incoming[0][where].to(wide) * (1 / (1 - dropout))
            if activation == "tanh":
                y = out[where].to(wide) * (
                    1 - dropout
                )  # dropped elements have no tanh here, and no gradient below
                grad.mul_(1 - y * y)
            if activation == "relu":
                grad.masked_fill_(out[where] <= 0, 0)  # what was dropped is 0 as well
            elif dropout:
                grad.masked_fill_(_dropped(grad, b, frames, U1, dropout, seed), 0)
            grid = grad.unflatten(0, (-1, U1))
            by_encoded[b, frames] = grid.sum(1)
            by_predicted[b, :U1] += grid.sum(0)
        return (by_encoded.to(incoming[0].dtype), by_predicted.to(incoming[0].dtype), *[None] * 4)


def _tiles(nodes: Nodes, packed: Tensor) -> Iterator[tuple[int, slice, int, slice]]:
    """Utterance, frames, lattice rows and packed rows of pieces whose masks and gradients fit in a
    core's cache.
    """
    tile_bytes = 1 << 20 if packed.device.type == "cpu" else 1 << 26
    for b in range(len(nodes.table)):
        T, U1, places = nodes.slices(b)
        step = max(1, tile_bytes // (8 * U1 * packed.shape[1]))
        for t in range(0, T, step):
            stop = min(t + step, T)
            yield b, slice(t, stop), U1, slice(places.start + t * U1, places.start + stop * U1)


def _dropped(tile: Tensor, b: int, frames: slice, U1: int, dropout: float, seed: int) -> Tensor:
    """True where an element of a tile (frames U1, D) is dropped."""
    from asrkit.losses.dropout import mask, node_keys

    t, u = (
        torch.arange(size.start, size.stop, device=tile.device) for size in (frames, slice(0, U1))
    )
    return ~mask(node_keys(b, t[:, None], u, seed).flatten(), tile.shape[1], dropout)


@eager
def rnnt_loss_packed(
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
    """rnnt_loss of packed logits (N, V): the same numbers in nats, without the padding; its notes
    on arguments hold.

    targets (B, U) and lengths (B,) are padded as ever. Memory beside the logits: their gradient, N
    V, and lattices; with overwrite_logits=True lattices only.

    >>> rnnt_loss_packed(torch.zeros(4, 3), torch.tensor([[0]]), torch.tensor([2]),
    torch.tensor([1]))  # log(27 / 2) tensor(2.6027)
    """
    check_options(reduction, clamp, fastemit_lambda)
    N, V = dims(logits, "N V", "logits")
    check_scores(logits, "logits")
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, blank, like=logits, T=None, U1=None, V=V
    )
    nodes, remedy = Nodes.packed(lengths, V), "Pack with the lengths that the loss is given."
    expect(nodes.count == N, "logits", f"N={nodes.count} rows, the sum of T (U + 1)", N, remedy)
    losses = import_module(
        f"asrkit.losses.rnnt.{pick(impl, IMPLS, logits, overwrite_logits)}"
    ).losses
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
    )
    return reduce(losses(logits.contiguous(), as_index(targets), nodes, options), reduction)
