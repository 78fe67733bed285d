"""Weights of other programs: read without running code, renamed and reshaped for asrkit."""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from asrkit.memory import map_file, return_free_memory
from asrkit.models.checkpoints.own import Weights, tensor_at
from asrkit.shapes import expect

# Linear layers that are convolutions of one frame in other programs.
_POINTWISE = (".gate.weight", ".pointwise.weight", "output.weight", "ctc_head.weight")


def saved(source: IO[bytes] | Path, name: str, device: str = "cpu") -> Any:
    """Tensors and plain values from a file of `torch.save`; ValueError if it has anything else.

    Args:
        source: The file.
        name: Name of the file in errors.
        device: "meta" for tensors without values, which `mapped` finds in the file.
    """
    try:
        return torch.load(source, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        why = str(error).rpartition("WeightsUnpickler error: ")[2].split(". ")[0]
        raise ValueError(f"{name} cannot be read as tensors alone ({why:.200}).") from None


def mapped(weights: Weights, path: Path, start: int = 0) -> Weights:
    """Weights of `saved` on "meta" with their values, which stay in the file until they are used.

    Args:
        weights: The weights by name; other values are kept.
        path: The file, of which the file of `torch.save` is a part.
        start: Bytes before this part.
    """
    data = map_file(path)
    result = {**weights}
    for name, weight in weights.items():
        if getattr(weight, "layout", None) == torch.strided:
            storage: Any = weight.untyped_storage()
            size = storage.nbytes() // weight.itemsize
            offset = start + storage._checkpoint_offset
            values = tensor_at(data, offset, weight.dtype, [size])
            view = (weight.size(), weight.stride(), weight.storage_offset())
            result[name] = values.as_strided(*view)
    return result


def replaced(name: str, names: Mapping[str, str]) -> str:
    """`name` with the parts in `names` replaced one after the other.

    The parts are patterns, in which a dot stands for itself.
    """
    for theirs, ours in names.items():
        name = re.sub(theirs.replace(".", r"\."), ours, name)
    return name


def renamed(
    weights: dict[str, Any], our_name: Callable[[str], str], unused: tuple[str, ...] = ()
) -> Weights:
    """`weights` by asrkit's names. `weights` is emptied, so that joined layers are in memory once.

    Args:
        weights: Weights by their names in another program.
        our_name: Maps these names to asrkit's. A name that asrkit does not know stays the same.
        unused: Prefixes of names that are left out.

    Raises:
        ValueError: Two weights get the same name, or a value is not a dense tensor.
    """
    result: Weights = {}
    for theirs in [*weights]:
        weight = weights.pop(theirs)
        if theirs.startswith(unused):
            continue
        ours = our_name(theirs)
        kind = getattr(weight, "layout", type(weight).__name__)
        expect(kind == torch.strided, theirs, "a dense tensor", kind)
        expect(ours not in result, "model", "weights of one model", f"two for {ours}")
        result[ours] = weight
    return result


def shape_conformer(weights: Weights) -> None:
    """Reshape weights of a FastConformer, named as in asrkit, in place.

    Pointwise convolutions become linear layers, biases of attention broadcast over frames, and
    queries, keys and values become one layer.
    """
    for name, value in weights.items():
        if name.endswith(_POINTWISE):
            weights[name] = value.flatten(1)
        if name.endswith((".content_bias", ".position_bias")):
            weights[name] = value[:, None]  # (H, D/H) -> (H, 1, D/H)
    join(weights, "qkv", "qkv")


def join(weights: Weights, parts: Sequence[str], joined: str) -> None:
    """Join layers that share an input into one layer, in place, by concatenating their rows.

    Args:
        weights: Weights, named as in asrkit except for the parts.
        parts: Names of the parts, in the order of their rows.
        joined: Name of the joined layer.
    """
    first = f".{parts[0]}."
    for name in [name for name in weights if first in name]:
        rows = [weights.pop(name.replace(first, f".{part}.")) for part in parts]
        weights[name.replace(first, f".{joined}.")] = torch.cat(rows)
        return_free_memory()


def drop_tied_output(weights: Weights, output: str) -> None:
    """Remove the weight of the output, in place: it is tied to the embedding.

    A file may have either of the two names.

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
