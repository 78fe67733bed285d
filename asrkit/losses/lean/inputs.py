"""What the lean losses take, and the checks of it."""

from numbers import Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asrkit.losses.lattice import check_scores
from asrkit.losses.lean.driver import Joint
from asrkit.shapes import dims, expect

Activation = Literal["relu", "tanh"]
# Size of a tile by default: a CPU core's cache; a GPU's cache; for Triton what keeps an H100 busy
# until the next launch is there.
TILE_MIB = {"cpu": 4, "cuda": 16, "triton": 256}
FEWEST_NODES = 64  # of a tile by default


class JointTensors(NamedTuple):
    """Both halves of a joint, encoded (B, T, D) and predicted (B, U1, D), and its output layer."""

    encoded: Tensor
    predicted: Tensor
    weight: Tensor
    bias: Tensor | None


class JointRequest(NamedTuple):
    """The keyword arguments of a lean loss that concern the joint; see `rnnt_loss_lean`."""

    activation: Activation
    dropout: float
    seed: int | None
    tile: int | None


def check_tensors(tensors: JointTensors) -> Tensor:
    """The bias, zeros where there is none; ValueError for tensors that do not fit together."""
    encoded, predicted, weight, bias = tensors
    B, _, D = dims(encoded, "B T D", "encoded")
    dims(predicted, "B U1 D", "predicted", B=B, D=D)
    outputs, _ = dims(weight, "V D", "weight", D=D)
    if bias is None:
        bias = weight.new_zeros(outputs)
    dims(bias, "V", "bias", V=outputs)
    named = {"encoded": encoded, "predicted": predicted, "weight": weight, "bias": bias}
    for name, tensor in named.items():
        check_scores(tensor, name)
        same = tensor.device == encoded.device
        expect(same, name, f"a tensor on {encoded.device}, as encoded", tensor.device)
    same = predicted.dtype == encoded.dtype
    expect(same, "predicted", f"{encoded.dtype}, as encoded", predicted.dtype)
    accumulated = torch.promote_types(weight.dtype, torch.float32)
    fits = torch.promote_types(bias.dtype, torch.float32) == accumulated
    expect(fits, "bias", f"{accumulated} beside this weight", bias.dtype)
    return bias


def resolve_joint(request: JointRequest, weight: Tensor, impl: str) -> Joint:
    """The joint as the tiles take it: seed drawn, size of a tile chosen; ValueError for options
    outside their range.

    Args:
        request: What the caller asked for.
        weight: Weight of the output layer (V, D), in the dtype of the products.
        impl: Name of the implementation that will run.
    """
    activation, dropout, seed, tile = request
    known = activation in ("relu", "tanh")
    expect(known, "activation", "'relu' or 'tanh'", repr(activation))
    ok = isinstance(dropout, Real) and 0 <= dropout < 1
    expect(ok, "dropout", "a probability below 1", dropout)
    ok = tile is None or (type(tile) is int and tile > 0)
    expect(ok, "tile", "a number of nodes, at least 1", tile)
    ok = seed is None or (isinstance(seed, int) and 0 <= seed < 2**32)
    expect(ok, "seed", "an integer of 32 bits", seed)
    if seed is None:
        seed = 0
        if dropout:
            seed = int(torch.randint(2**31, ()))
    if tile is None:
        place = weight.device.type
        if impl == "triton":
            place = "triton"
        tile_MiB = TILE_MIB.get(place, TILE_MIB["cuda"])
        row_bytes = max(weight.shape) * weight.element_size()
        tile = max(FEWEST_NODES, tile_MiB * 2**20 // row_bytes)
    return Joint(activation=activation, dropout=dropout, seed=seed, tile=tile)
