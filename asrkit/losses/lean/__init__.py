"""The lean losses: from the two halves of the joint and its output layer to the loss, without ever
building the joint's logits.
"""

from dataclasses import replace
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from asrkit.losses.lattice import (
    LatticeOptions,
    Nodes,
    Reduction,
    as_index,
    check_durations,
    check_lengths,
    check_options,
    expect_runs,
    fastest,
    reduce,
    takes_plain_loss,
)
from asrkit.losses.lean.driver import LeanLoss
from asrkit.losses.lean.inputs import (
    Activation,
    JointRequest,
    JointTensors,
    check_tensors,
    resolve_joint,
)
from asrkit.runtime import autocast, autocast_dtype, eager
from asrkit.shapes import expect

Impl = Literal["auto", "plain", "numba_cpu", "triton"]
# The lattice beside each implementation's tiles.
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
    activation: Activation = "relu",
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
        activation: "relu" or "tanh", of the hidden layer.
        blank: Index of blank; negative ones count from the end.
        reduction: "mean" or "sum" over the batch, or "none".
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda (arXiv 2010.11148).
        dropout: Probability that an element of the hidden layer is dropped. The mask is a hash of
            seed, utterance, node and column: computed again, never stored.
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
    >>> rnnt_loss_lean(*halves, *output, torch.tensor([[0]]), *lengths)
    tensor(2.6027)
    """
    return _lean_loss(
        JointTensors(encoded, predicted, weight, bias),
        (targets, logit_lengths, target_lengths),
        JointRequest(activation, dropout, seed, tile),
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
    durations: tuple[int, ...] = (0, 1, 2, 3, 4),
    sigma: float = 0.0,
    omega: float = 0.0,
    activation: Activation = "relu",
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
        durations: The n jumps in frames, one of them above 0.
        sigma: Logit under-normalisation, in nats; see `tdt_loss`.
        omega: Share of calls that take the RNN-T loss of the token logits; see `tdt_loss`.
        activation: "relu" or "tanh", of the hidden layer.
        blank: Index of blank among the tokens; negative ones count from their end.
        reduction: "mean" or "sum" over the batch, or "none".
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda (arXiv 2010.11148).
        dropout: Probability that an element of the hidden layer is dropped.
        seed: Seed of dropout's mask, 32 bits; None draws one from torch's default generator.
        tile: Nodes of a tile; None takes what fits a cache.
        impl: "plain" (torch), "numba_cpu", "triton", or "auto", as in `rnnt_loss_lean`.

    Raises:
        ValueError: Arguments that do not fit together, or an `impl` that cannot run here.
    """
    check_durations(durations, sigma, omega)
    tensors = JointTensors(encoded, predicted, weight, bias)
    options = LatticeOptions(blank=blank, fastemit_lambda=fastemit_lambda)
    if takes_plain_loss(omega):
        n = len(durations)
        token_bias = None
        if bias is not None:
            token_bias = bias[:-n]
        tensors = JointTensors(encoded, predicted, weight[:-n], token_bias)
    else:
        options = replace(options, durations=tuple(durations), sigma=sigma)
    return _lean_loss(
        tensors,
        (targets, logit_lengths, target_lengths),
        JointRequest(activation, dropout, seed, tile),
        options,
        reduction,
        impl,
    )


def _lean_loss(
    tensors: JointTensors,
    alignment: tuple[Tensor, Tensor, Tensor],
    request: JointRequest,
    options: LatticeOptions,
    reduction: Reduction,
    impl: Impl,
) -> Tensor:
    """Check, pick an implementation, run it. `alignment` is targets and both lengths."""
    bias = check_tensors(tensors)
    encoded, predicted, weight, _ = tensors
    targets, logit_lengths, target_lengths = alignment
    check_options(reduction, fastemit_lambda=options.fastemit_lambda)
    outputs = len(weight)
    V = outputs - len(options.durations)
    expect(V > 1, "weight", "rows for a blank, labels and durations", tuple(weight.shape))
    lengths = check_lengths(
        targets,
        logit_lengths,
        target_lengths,
        options.blank,
        like=encoded,
        T=encoded.shape[1],
        U1=predicted.shape[1],
        V=V,
    )
    weight = weight.to(autocast_dtype(encoded.device.type) or weight.dtype)
    picked = _pick(impl, encoded, weight)
    joint = resolve_joint(request, weight, picked)
    lattice = import_module(f"asrkit.losses.{LATTICES[picked]}").lattice
    make_tiles = import_module(f"{__name__}.{picked}").Tiles
    inputs = [encoded, predicted, weight, bias]
    if not torch.is_grad_enabled():
        inputs = [tensor.detach() for tensor in inputs]
    with autocast(encoded.device.type), torch.cuda.device_of(encoded):
        costs = LeanLoss.apply(
            *inputs,
            as_index(targets, encoded.device),
            Nodes.packed(lengths, outputs),
            replace(options, blank=options.blank % V),
            joint,
            make_tiles,
            lattice,
        )
        return reduce(costs, reduction)


def _pick(impl: Impl, encoded: Tensor, weight: Tensor) -> str:
    """Name of the implementation that runs; ValueError where a named one cannot."""
    listed = ", ".join(map(repr, LATTICES))
    expect(impl in ("auto", *LATTICES), "impl", f"one of 'auto', {listed}", repr(impl))
    if impl == "auto":
        by_half = fastest(encoded)
        if by_half == fastest(weight) and by_half in LATTICES:
            return by_half
        return "plain"
    if impl != "plain":
        expect_runs(impl, encoded, "encoded")
        expect_runs(impl, weight, "weight")
    return impl
