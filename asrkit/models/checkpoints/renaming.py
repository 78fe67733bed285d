"""Weights of other programs by asrkit's names and in its shapes, layers joined as in asrkit."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from asrkit.shapes import expect

# Layers that are linear here, and convolutions of one frame elsewhere.
_POINTWISE = (".gate.weight", ".pointwise.weight", "output.weight", "ctc_head.weight")


def replaced(name: str, names: Mapping[str, str]) -> str:
    """`name` with each part that `names` lists replaced by asrkit's, one after the other."""
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def beginning_replaced(name: str, names: Mapping[str, str]) -> str | None:
    """`name` with the beginning that `names` has replaced; None where it has none."""
    for theirs, ours in names.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name[len(theirs) :]
    return None


def renamed(weights: dict[str, Tensor], our_name: Callable[[str], str]) -> dict[str, Tensor]:
    """`weights` by asrkit's names; empties `weights`, so that joined layers are in memory once.

    Args:
        weights: By the names of their program.
        our_name: A name of theirs to asrkit's; of a weight that asrkit does not know, to itself.

    Raises:
        ValueError: Two weights get one name.
    """
    found: dict[str, Tensor] = {}
    for theirs in [*weights]:
        ours = our_name(theirs)
        expect(ours not in found, "model", "weights of one model", f"two for {ours}")
        found[ours] = weights.pop(theirs)
    return found


def shape_conformer(weights: dict[str, Tensor]) -> None:
    """Give weights of a FastConformer, by asrkit's names, its shapes, in place.

    Pointwise convolutions are linear layers, biases of attention broadcast over frames, and
    queries, keys and values are one layer.
    """
    for name, value in weights.items():
        if name.endswith(_POINTWISE):
            weights[name] = value.flatten(1)
        if name.endswith((".content_bias", ".position_bias")):
            weights[name] = value[:, None]  # (H, D/H) -> (H, 1, D/H)
    join(weights, ".attention", "qkv", "qkv")


def join(weights: dict[str, Tensor], within: str, parts: Sequence[str], joined: str) -> None:
    """Make one layer of several that read the same, in place, by putting their rows together.

    Args:
        weights: By asrkit's names, but for the parts.
        within: End of the name before the part, such as ".self_attention"; "" for every layer.
        parts: Names of the parts, in the order of their rows.
        joined: Name of the layer.
    """
    first = f"{within}.{parts[0]}."
    for name in [name for name in weights if first in name]:
        rows = [weights.pop(name.replace(first, f"{within}.{part}.")) for part in parts]
        weights[name.replace(first, f"{within}.{joined}.")] = torch.cat(rows)


def drop_tied_output(weights: dict[str, Tensor], output: str) -> None:
    """Remove the weight of the output, in place, which is the embedding's.

    Args:
        weights: With the embedding by asrkit's name.
        output: Name of the output's weight; it may be missing.

    Raises:
        ValueError: The output has weights of its own.
    """
    tied = weights.pop(output, None)
    if tied is not None:
        wanted = "the weights of the embedding, to which it is tied"
        expect(torch.equal(tied, weights["embedding.weight"]), output, wanted, "others")
