"""The lean losses: from the two halves of the joint and its output layer straight to the loss.

The logits of the joint are never all in memory.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from asrkit.devices import autocast, autocast_dtype
from asrkit.losses.arguments import (
    Reduction,
    as_index,
    check_durations,
    check_halves,
    check_lengths,
    check_options,
    check_scores,
    draws_rnnt,
    expect_runs,
    fastest,
    reduce,
)
from asrkit.losses.lattice import LatticeOptions, Nodes
from asrkit.losses.lean.driver import Joint, LeanActivation, LeanLoss
from asrkit.shapes import dims, expect, expect_choice
from asrkit.threads import eager

Impl = Literal["auto", "plain", "numba_cpu", "triton"]
# Each implementation is a file of tiles in this folder; its lattice is a file of asrkit.losses.
LATTICES = {"plain": "wavefront", "numba_cpu": "numba_cpu", "triton": "triton"}


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
    activation: LeanActivation,
    blank: int = -1,
    reduction: Reduction = "mean",
    fastemit_lambda: float = 0.0,
    dropout: float = 0.0,
    seed: int | None = None,
    tile: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """RNN-T loss in nats of a joint that is never built: a scalar, or (B,) without reduction.

    The loss and its four gradients equal those of `rnnt_loss` with logits = activation(encoded[:,
    :, None] + predicted[:, None]) @ weight.T + bias. The logits are computed twice, tile by tile,
    with four matrix products instead of three.

    Memory: one tile of `tile` nodes (D + V + D numbers a node with compiled kernels, about four
    times as much in plain torch), about 40 bytes for each node of the lattice, and the gradients.
    Products have weight's dtype, or autocast's; sums are float32. The notes on `rnnt_loss` about
    infinite losses, gradients, and integers on the host apply.

    Args:
        encoded: Projected encoder frames (B, T, D).
        predicted: Projected predictions of the lattice rows (B, U1, D), in encoded's dtype.
        weight: Weight of the output layer (V, D).
        bias: Bias of the output layer (V,), or None.
        targets: Labels (B, U), int32 or int64; padding may hold anything.
        logit_lengths: Frames of each utterance (B,), int32 or int64.
        target_lengths: Labels of each utterance (B,), int32 or int64.
        activation: Activation of the hidden layer, "relu" or "tanh". It must be the model's own.
        blank: Index of blank; negative ones count from the end.
        reduction: "mean" or "sum" over the batch, or "none".
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda (arXiv 2010.11148).
        dropout: Probability that an element of the hidden layer is dropped. In training, pass the
            rate of the model's dropout module, because that module is not called. The mask is a
            hash of seed, utterance, node and column; it is recomputed, never stored.
        seed: Seed of that mask, 32 bits; None draws one from torch's default generator.
        tile: Nodes of a tile. None chooses as many as fit a cache, or 256 MiB with impl="triton",
            whose smallest tile is one frame.
        impl: "plain" (torch), "numba_cpu", "triton", or "auto": numba_cpu on a CPU, triton on a GPU
            if it works there, otherwise plain.

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
        Joint(activation=activation, dropout=dropout, seed=seed, tile=tile),
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
    activation: LeanActivation,
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

    It equals `tdt_loss` of the joint's logits, V for the tokens and then n for the durations. See
    `rnnt_loss_lean` for memory and precision.

    Args:
        encoded: Projected encoder frames (B, T, D).
        predicted: Projected predictions of the lattice rows (B, U1, D), in encoded's dtype.
        weight: Weight of the output layer (V + n, D).
        bias: Bias of the output layer (V + n,), or None.
        targets: Labels (B, U), int32 or int64; padding may hold anything.
        logit_lengths: Frames of each utterance (B,), int32 or int64.
        target_lengths: Labels of each utterance (B,), int32 or int64.
        activation: Activation of the hidden layer, "relu" or "tanh". It must be the model's own.
        durations: The n durations in frames, one of them above 0.
        sigma: Logit under-normalisation, in nats; see `tdt_loss`.
        omega: Probability that a call computes the RNN-T loss of the token logits; see `tdt_loss`.
        blank: Index of blank among the tokens; negative ones count from the last token.
        reduction: "mean" or "sum" over the batch, or "none".
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda (arXiv 2010.11148).
        dropout: Probability that an element of the hidden layer is dropped, as in `rnnt_loss_lean`.
        seed: Seed of dropout's mask, 32 bits; None draws one from torch's default generator.
        tile: Nodes of a tile, as in `rnnt_loss_lean`.
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
        Joint(activation=activation, dropout=dropout, seed=seed, tile=tile),
        options,
        reduction,
        impl,
        omega,
    )


def _lean_loss(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    integers: tuple[Tensor, Tensor, Tensor],
    joint: Joint,
    options: LatticeOptions,
    reduction: Reduction,
    impl: Impl,
    omega: float = 0.0,
) -> Tensor:
    """Check the tensors, choose an implementation and run it.

    Args:
        inputs: encoded, predicted, weight and bias.
        integers: targets, logit_lengths and target_lengths.
        joint: The hidden layer, checked.
        options: The loss's options; `blank` may still be negative.
        reduction: Reduction over the batch.
        impl: The caller's choice.
        omega: Probability that this call computes the RNN-T loss.
    """
    encoded, predicted, weight, bias = inputs
    _, T, U1, D = check_halves(encoded, predicted)
    outputs, _ = dims(weight, "V D", "weight", D=D)
    if bias is None:
        bias = weight.new_zeros(outputs)
    dims(bias, "V", "bias", V=outputs)
    check_scores(weight, "weight", encoded)
    check_scores(bias, "bias", encoded)
    expect_choice("activation", joint.activation, get_args(LeanActivation))
    check_options(reduction, fastemit_lambda=options.fastemit_lambda)
    V = outputs - len(options.durations)
    expect(V > 1, "weight", "rows for a blank, labels and durations", tuple(weight.shape))
    lengths = check_lengths(*integers, options.blank, like=encoded, T=T, U1=U1, V=V)
    weight = weight.to(autocast_dtype(encoded.device.type) or weight.dtype)
    chosen = choose_tiles(impl, encoded, weight)
    options = replace(options, blank=options.blank % V, as_rnnt=draws_rnnt(omega))
    tensors = [encoded, predicted, weight, bias]
    if not torch.is_grad_enabled():
        tensors = [tensor.detach() for tensor in tensors]
    with autocast(encoded.device.type), torch.cuda.device_of(encoded):
        costs = LeanLoss.apply(
            *tensors,
            as_index(integers[0], encoded.device),
            Nodes.packed(lengths, outputs),
            options,
            joint,
            tiles(chosen),
            import_module(f"asrkit.losses.{LATTICES[chosen]}").lattice,
        )
        return reduce(costs, reduction)


def tiles(impl: str) -> Any:
    """Return the tiles of an implementation, a subclass of `NodeTiles`."""
    return import_module(f"{__name__}.{impl}").Tiles


def choose_tiles(impl: Impl, encoded: Tensor, weight: Tensor) -> str:
    """Return the implementation that runs; ValueError if the named one cannot."""
    expect_choice("impl", impl, ("auto", *LATTICES))
    if impl == "auto":
        chosen = fastest(encoded)
        if chosen == fastest(weight) and chosen in LATTICES:
            return chosen
        return "plain"
    expect_runs(impl, encoded, "encoded")
    expect_runs(impl, weight, "weight")
    return impl
