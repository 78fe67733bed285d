"""The lean losses: from the two halves of the joint and its output layer to the loss, without ever
building the joint's logits.
"""

from dataclasses import replace
from importlib import import_module
from typing import Literal, get_args

import torch
from torch import Tensor

from asrkit.devices import autocast, autocast_dtype
from asrkit.losses.choice import expect_runs, fastest
from asrkit.losses.lattice import (
    LatticeOptions,
    Nodes,
    Reduction,
    as_index,
    check_durations,
    check_halves,
    check_lengths,
    check_options,
    check_scores,
    reduce,
    takes_plain_loss,
)
from asrkit.losses.lean.driver import Joint, LeanLoss, NodeTiles
from asrkit.shapes import dims, expect, expect_choice, is_finite, whole
from asrkit.threads import eager

Activation = Literal["relu", "tanh"]
Impl = Literal["auto", "plain", "numba_cpu", "triton"]
# The lattice beside each implementation's tiles.
LATTICES = {"plain": "wavefront", "numba_cpu": "numba_cpu", "triton": "triton"}
FEWEST_NODES = 64  # of a tile by default


@eager
def rnnt_loss_lean(  # noqa: PLR0913 - rnnt_loss's arguments, with the joint's in place of logits
    encoded: Tensor,
    predicted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    activation: Activation,
    blank: int = -1,
    reduction: Reduction = "mean",
    fastemit_lambda: float = 0.0,
    dropout: float = 0.0,
    seed: int | None = None,
    tile: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """RNN-T loss in nats of a joint that is never built: a scalar, or (B,) without reduction.

    It equals `rnnt_loss` of logits = activation(encoded[:, :, None] + predicted[:, None]) @
    weight.T + bias, and so do its four gradients. The logits are computed twice, tile by tile: four
    matrix products in place of three.

    Memory: one tile of `tile` nodes (D + V + D numbers a node with compiled kernels, some four
    times that in plain torch), about 40 bytes for each node of the lattice, and the gradients.
    Products run in weight's dtype, or in autocast's; sums in float32. What `rnnt_loss` says of its
    losses, infinite ones, gradients, and integers on the host holds here too.

    Args:
        encoded: Projected encoder frames (B, T, D).
        predicted: Projected predictions of the lattice rows (B, U1, D), in encoded's dtype.
        weight: Weight of the output layer (V, D).
        bias: Bias of the output layer (V,), or None.
        targets: Labels (B, U), int32 or int64; padding may hold anything.
        logit_lengths: Frames of each utterance (B,), int32 or int64.
        target_lengths: Labels of each utterance (B,), int32 or int64.
        activation: "relu" or "tanh", of the hidden layer: the model's, as any other is a loss of
            another model.
        blank: Index of blank; negative ones count from the end.
        reduction: "mean" or "sum" over the batch, or "none".
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda (arXiv 2010.11148).
        dropout: Probability that an element of the hidden layer is dropped: in training the
            model's own, which is not called here. The mask is a hash of seed, utterance, node and
            column: computed again, never stored.
        seed: Seed of that mask, 32 bits; None draws one from torch's default generator.
        tile: Nodes of a tile; None takes what fits a cache, and with impl="triton" 256 MiB, whole
            frames at least.
        impl: "plain" (torch), "numba_cpu", "triton", or "auto": numba_cpu on a CPU, triton on a GPU
            where it works, else plain.

    Raises:
        ValueError: Arguments that do not fit together, or an `impl` that cannot run here.

    >>> halves = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    >>> output = torch.zeros(3, 4), torch.zeros(3)
    >>> lengths = torch.tensor([2]), torch.tensor([1])
    >>> rnnt_loss_lean(*halves, *output, torch.tensor([[0]]), *lengths, activation="tanh")
    tensor(2.6027)
    """
    return _lean_loss(
        (encoded, predicted, weight, bias),
        (targets, logit_lengths, target_lengths),
        (activation, dropout, seed, tile),
        LatticeOptions(blank=blank, fastemit_lambda=fastemit_lambda),
        reduction,
        impl,
    )


@eager
def tdt_loss_lean(  # noqa: PLR0913 - tdt_loss's arguments, with the joint's in place of logits
    encoded: Tensor,
    predicted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    activation: Activation,
    durations: tuple[int, ...] = (0, 1, 2, 3, 4),
    sigma: float = 0.0,
    omega: float = 0.0,
    blank: int = -1,
    reduction: Reduction = "mean",
    fastemit_lambda: float = 0.0,
    dropout: float = 0.0,
    seed: int | None = None,
    tile: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """TDT loss in nats of a joint that is never built: a scalar, or (B,) without reduction.

    It equals `tdt_loss` of the joint's logits, with the n duration logits behind those of the V
    tokens; see `rnnt_loss_lean` for memory and precision.

    Args:
        encoded: Projected encoder frames (B, T, D).
        predicted: Projected predictions of the lattice rows (B, U1, D), in encoded's dtype.
        weight: Weight of the output layer (V + n, D).
        bias: Bias of the output layer (V + n,), or None.
        targets: Labels (B, U), int32 or int64; padding may hold anything.
        logit_lengths: Frames of each utterance (B,), int32 or int64.
        target_lengths: Labels of each utterance (B,), int32 or int64.
        activation: "relu" or "tanh", of the hidden layer: the model's, as any other is a loss of
            another model.
        durations: The n jumps in frames, one of them above 0.
        sigma: Logit under-normalisation, in nats; see `tdt_loss`.
        omega: Share of calls that take the RNN-T loss of the token logits; see `tdt_loss`.
        blank: Index of blank among the tokens; negative ones count from their end.
        reduction: "mean" or "sum" over the batch, or "none".
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda (arXiv 2010.11148).
        dropout: Probability that an element of the hidden layer is dropped, as in `rnnt_loss_lean`.
        seed: Seed of dropout's mask, 32 bits; None draws one from torch's default generator.
        tile: Nodes of a tile; None takes what fits a cache.
        impl: "plain" (torch), "numba_cpu", "triton", or "auto", as in `rnnt_loss_lean`.

    Raises:
        ValueError: Arguments that do not fit together, or an `impl` that cannot run here.
    """
    check_durations(durations, sigma, omega)
    options = LatticeOptions(
        blank=blank, fastemit_lambda=fastemit_lambda, durations=tuple(durations), sigma=sigma
    )
    return _lean_loss(
        (encoded, predicted, weight, bias),
        (targets, logit_lengths, target_lengths),
        (activation, dropout, seed, tile),
        options,
        reduction,
        impl,
        omega,
    )


def _lean_loss(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    alignment: tuple[Tensor, Tensor, Tensor],
    layer: tuple[str, float, int | None, int | None],
    options: LatticeOptions,
    reduction: Reduction,
    impl: Impl,
    omega: float = 0.0,
) -> Tensor:
    """Check, pick an implementation, run it.

    Args:
        tensors: encoded, predicted, weight and bias.
        alignment: targets, logit_lengths and target_lengths.
        layer: activation, dropout, seed and tile.
        options: of the loss.
        reduction: over the batch.
        impl: as the caller named it.
        omega: probability that a call takes RNN-T's loss.
    """
    encoded, predicted, weight, bias = tensors
    _, T, U1, D = check_halves(encoded, predicted)
    outputs, _ = dims(weight, "V D", "weight", D=D)
    if bias is None:
        bias = weight.new_zeros(outputs)
    dims(bias, "V", "bias", V=outputs)
    check_scores(weight, "weight", encoded)
    check_scores(bias, "bias", encoded)
    check_options(reduction, fastemit_lambda=options.fastemit_lambda)
    V = outputs - len(options.durations)
    expect(V > 1, "weight", "rows for a blank, labels and durations", tuple(weight.shape))
    lengths = check_lengths(*alignment, options.blank, like=encoded, T=T, U1=U1, V=V)
    weight = weight.to(autocast_dtype(encoded.device.type) or weight.dtype)
    picked = _pick(impl, encoded, weight)
    lattice = import_module(f"asrkit.losses.{LATTICES[picked]}").lattice
    make_tiles = import_module(f"{__name__}.{picked}").Tiles
    joint = _joint(*layer, weight, make_tiles)
    as_rnnt = takes_plain_loss(omega)
    inputs = [encoded, predicted, weight, bias]
    if not torch.is_grad_enabled():
        inputs = [tensor.detach() for tensor in inputs]
    with autocast(encoded.device.type), torch.cuda.device_of(encoded):
        costs = LeanLoss.apply(
            *inputs,
            as_index(alignment[0], encoded.device),
            Nodes.packed(lengths, outputs),
            replace(options, blank=options.blank % V, as_rnnt=as_rnnt),
            joint,
            make_tiles,
            lattice,
        )
        return reduce(costs, reduction)


def _pick(impl: Impl, encoded: Tensor, weight: Tensor) -> str:
    """Name of the implementation that runs; ValueError where a named one cannot."""
    expect_choice("impl", impl, ("auto", *LATTICES))
    if impl == "auto":
        by_half = fastest(encoded)
        if by_half == fastest(weight) and by_half in LATTICES:
            return by_half
        return "plain"
    expect_runs(impl, encoded, "encoded")
    expect_runs(impl, weight, "weight")
    return impl


def _joint(
    activation: str,
    dropout: float,
    seed: int | None,
    tile: int | None,
    weight: Tensor,
    tiles: type[NodeTiles],
) -> Joint:
    """The joint as `tiles` take it, with a seed drawn and the size of a tile chosen where they are
    None; ValueError for one outside its range.
    """
    expect_choice("activation", activation, get_args(Activation))
    is_probability = is_finite(dropout) and 0 <= dropout < 1
    expect(is_probability, "dropout", "a probability below 1", dropout)
    fits = tile is None or whole(tile, 1)
    expect(fits, "tile", "a number of nodes, at least 1", tile)
    fits = seed is None or whole(seed, 0, 2**32 - 1)
    expect(fits, "seed", "an integer of 32 bits", seed)
    if seed is None:
        seed = int(torch.randint(2**31, (), device="cpu")) if dropout else 0
    if tile is None:
        on_cpu = weight.device.type == "cpu"
        tile_MiB = tiles.cpu_tile_MiB if on_cpu else tiles.gpu_tile_MiB
        row_bytes = max(weight.shape) * weight.element_size()
        tile = max(FEWEST_NODES, tile_MiB * 2**20 // row_bytes)
    return Joint(activation=activation, dropout=dropout, seed=seed, tile=tile)
