"""The doors to the losses that never build the joint: from its two halves and the output layer to
the loss.
"""

from importlib import import_module
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from asrkit.losses.availability import expect_runs, fastest, lattice_beside
from asrkit.losses.checks import (
    Reduction,
    as_index,
    check_durations,
    check_lengths,
    check_options,
    check_scores,
    reduce,
    takes_plain_loss,
)
from asrkit.losses.lean.driver import Joint, LeanLoss
from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.runtime import eager
from asrkit.shapes import dims, expect

Activation = Literal["relu", "tanh"]
Impl = Literal["auto", "plain", "numba_cpu", "triton"]
LATTICES = {
    "plain": "wavefront",
    "numba_cpu": "numba_cpu",
    "triton": "",
}  # beside each implementation's tiles; "": what works
TILE_BYTES = {
    "cpu": 1 << 22,
    "cuda": 1 << 24,
    "triton": 1 << 28,
}  # a core's cache; a GPU's; launches of some milliseconds each


@eager
def rnnt_loss_lean(
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
    skip: float = 0.0,
    tile: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """rnnt_loss of logits = activation(encoded[:, :, None] + predicted[:, None]) @ weight.T + bias,
    which never exist.

    encoded (B, T, D) and predicted (B, U1, D) are the halves of the joint, projected; weight (V,
    D), bias (V,) or None. Exact: values and all four gradients are those of the joint, in nats.
    Memory: one tile of `tile` nodes (D + V + D each on a CPU, some four times that in plain torch,
    D + V in the second pass of Triton's kernels), about 40 bytes a node, and the gradients. A tile
    is by default what fits a cache. With impl="triton" `tile` counts the nodes of a run of small
    tiles, by default those of 256 MiB, since each run takes three launches. Price: the logits are
    computed twice, four matrix products instead of three.

    dropout drops hidden elements by a mask that depends on `seed` (drawn from torch.manual_seed's
    generator if None), the utterance, the node and the column alone: computed again, never stored.
    skip > 0 leaves nodes with no larger share of the likelihood out of the second pass; the
    gradient then misses at most 2 skip for each node left out. Products run in weight's dtype, or
    in autocast's, sums in float32. Nothing else here differs from rnnt_loss, whose notes hold.

    >>> halves = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    >>> rnnt_loss_lean(*halves, torch.zeros(3, 4), torch.zeros(3), torch.tensor([[0]]),
    torch.tensor([2]), torch.tensor([1])) tensor(2.6027)
    """
    given = encoded, predicted, weight, bias, targets, logit_lengths, target_lengths
    joint = {"activation": activation, "dropout": dropout, "seed": seed, "skip": skip, "tile": tile}
    return _loss(*given, joint, blank, reduction, impl, fastemit_lambda=fastemit_lambda)


@eager
def tdt_loss_lean(
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
    skip: float = 0.0,
    tile: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """tdt_loss without the joint: as rnnt_loss_lean, with weight (V + n, D) and bias (V + n,), the
    n durations last.
    """
    check_durations(durations, sigma, omega)
    n, joint = (
        len(durations),
        {"activation": activation, "dropout": dropout, "seed": seed, "skip": skip, "tile": tile},
    )
    given = targets, logit_lengths, target_lengths, joint, blank, reduction, impl
    if takes_plain_loss(omega):
        return _loss(
            encoded,
            predicted,
            weight[:-n],
            None if bias is None else bias[:-n],
            *given,
            fastemit_lambda=fastemit_lambda,
        )
    options: dict[str, Any] = {
        "durations": tuple(durations),
        "sigma": sigma,
        "fastemit_lambda": fastemit_lambda,
    }
    return _loss(encoded, predicted, weight, bias, *given, **options)


def _loss(
    encoded: Tensor,
    predicted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    joint: dict[str, Any],
    blank: int,
    reduction: Reduction,
    impl: Impl,
    **options: Any,
) -> Tensor:
    B, T, D = dims(encoded, "B T D", "encoded")
    _, U1, _ = dims(predicted, "B U1 D", "predicted", B=B, D=D)
    outputs, _ = dims(weight, "V D", "weight", D=D)
    bias = weight.new_zeros(outputs) if bias is None else bias
    dims(bias, "V", "bias", V=outputs)
    for name, tensor in {
        "encoded": encoded,
        "predicted": predicted,
        "weight": weight,
        "bias": bias,
    }.items():
        check_scores(tensor, name)
        expect(
            tensor.device == encoded.device,
            name,
            f"a tensor on {encoded.device}, as encoded",
            tensor.device,
        )
    expect(
        predicted.dtype == encoded.dtype,
        "predicted",
        f"{encoded.dtype}, as encoded",
        predicted.dtype,
    )
    wide = torch.promote_types(weight.dtype, torch.float32)
    expect(
        torch.promote_types(bias.dtype, torch.float32) == wide,
        "bias",
        f"{wide} beside this weight",
        bias.dtype,
    )
    check_options(reduction, fastemit_lambda=options["fastemit_lambda"])
    V = outputs - len(options.get("durations", ()))
    expect(V > 1, "weight", "rows for a blank, labels and durations", tuple(weight.shape))
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, blank, like=encoded, T=T, U1=U1, V=V
    )
    if torch.is_autocast_enabled(encoded.device.type):
        weight = weight.to(torch.get_autocast_dtype(encoded.device.type))
    picked = _pick(impl, encoded, weight)
    made, nodes = _joint(weight, picked, **joint), Nodes.packed(lengths, outputs)
    beside = LATTICES[picked] or lattice_beside(encoded)
    lattice = import_module(
        f"asrkit.losses.{'tdt' if 'durations' in options else 'rnnt'}.{beside}"
    ).lattice
    tiles = import_module(f"{__name__}.{picked}").Tiles
    arguments = (
        as_index(targets),
        nodes,
        LatticeOptions(blank=blank % V, **options),
        made,
        tiles,
        lattice,
    )
    given = (
        x if torch.is_grad_enabled() else x.detach() for x in (encoded, predicted, weight, bias)
    )
    with torch.autocast(encoded.device.type, enabled=False), torch.cuda.device_of(encoded):
        return reduce(LeanLoss.apply(*given, *arguments), reduction)


def _pick(impl: Impl, encoded: Tensor, weight: Tensor) -> str:
    expect(
        impl in ("auto", *LATTICES),
        "impl",
        "one of 'auto', " + ", ".join(map(repr, LATTICES)),
        repr(impl),
    )
    if impl == "auto":
        return "numba_cpu" if fastest(encoded) == fastest(weight) == "numba_cpu" else "plain"
    if impl != "plain":
        expect_runs(impl, encoded, "encoded")
        expect_runs(impl, weight, "weight")
    return impl


def _joint(
    weight: Tensor,
    impl: str,
    activation: str,
    dropout: float,
    seed: int | None,
    skip: float,
    tile: int | None,
) -> Joint:
    expect(activation in ("relu", "tanh"), "activation", "'relu' or 'tanh'", repr(activation))
    expect(
        isinstance(dropout, Real) and 0 <= dropout < 1, "dropout", "a probability below 1", dropout
    )
    expect(
        isinstance(skip, Real) and 0 <= skip < 1, "skip", "a share of the likelihood, below 1", skip
    )
    expect(
        tile is None or (type(tile) is int and tile > 0),
        "tile",
        "a number of nodes, at least 1",
        tile,
    )
    expect(
        seed is None or (isinstance(seed, int) and 0 <= seed < 2**32),
        "seed",
        "an integer of 32 bits",
        seed,
    )
    drawn = int(torch.randint(2**31, ())) if dropout and seed is None else seed or 0
    tile_bytes = TILE_BYTES[
        "triton" if impl == "triton" else "cpu" if weight.device.type == "cpu" else "cuda"
    ]
    nodes = tile or max(64, tile_bytes // (max(weight.shape) * weight.element_size()))
    return Joint(activation=activation, dropout=dropout, seed=drawn, skip=skip, tile=nodes)
