"""Weights of other programs: read without running code, by asrkit's names, in its layers."""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from asrkit.models.checkpoints.own import Weights
from asrkit.shapes import expect

# Layers that are linear here, and convolutions of one frame elsewhere.
_POINTWISE = (".gate.weight", ".pointwise.weight", "output.weight", "ctc_head.weight")


def saved(source: IO[bytes] | Path, name: str, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote to a file: tensors and plain values, or ValueError.

    Args:
        source: The file.
        name: Of it, in errors.
        mmap: Whether tensors stay in the file until they are used.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        why = str(error).rpartition("WeightsUnpickler error: ")[2].split(". ")[0]
        raise ValueError(f"{name} cannot be read as tensors alone ({why:.200}).") from None


def replaced(name: str, names: Mapping[str, str]) -> str:
    """`name` with each part that `names` lists replaced by asrkit's, in order.

    Parts are patterns in which a dot is a dot.
    """
    for theirs, ours in names.items():
        name = re.sub(theirs.replace(".", r"\."), ours, name)
    return name


def renamed(weights: dict[str, Any], our_name: Callable[[str], str]) -> Weights:
    """`weights` by asrkit's names; empties `weights`, so that joined layers are in memory once.

    Args:
        weights: By the names of their program.
        our_name: A name of theirs to asrkit's; of a weight that asrkit does not know, to itself.

    Raises:
        ValueError: Two weights get one name, or one is no dense tensor.
    """
    found: Weights = {}
    for theirs in [*weights]:
        ours = our_name(theirs)
        weight = weights.pop(theirs)
        kind = getattr(weight, "layout", type(weight).__name__)
        expect(kind == torch.strided, theirs, "a dense tensor", kind)
        expect(ours not in found, "model", "weights of one model", f"two for {ours}")
        found[ours] = weight
    return found


def shape_conformer(weights: Weights) -> None:
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


def join(weights: Weights, within: str, parts: Sequence[str], joined: str) -> None:
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


def drop_tied_output(weights: Weights, output: str) -> None:
    """Remove the output's weight, in place: it is the embedding's, and may stand for it.

    Raises:
        ValueError: The two differ.
    """
    tied = weights.pop(output, None)
    if tied is not None:
        expect(
            torch.equal(tied, weights.setdefault("embedding.weight", tied)),
            output,
            "the weights of the embedding, to which it is tied",
            "others",
        )
