"""Weights of Hugging Face folders and Canarys by asrkit's names, layers joined as in asrkit."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from asrkit.shapes import expect


def replaced(name: str, names: Mapping[str, str]) -> str:
    """`name` with each part that `names` lists replaced by asrkit's, one after the other."""
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def renamed(weights: Mapping[str, Tensor], our_name: Callable[[str], str]) -> dict[str, Tensor]:
    """`weights` by asrkit's names.

    Args:
        weights: By the names of their program.
        our_name: A name of theirs to asrkit's.

    Raises:
        ValueError: Two weights get one name.
    """
    found: dict[str, Tensor] = {}
    for theirs, value in weights.items():
        ours = our_name(theirs)
        expect(ours not in found, "model", "weights of one model", f"two for {ours}")
        found[ours] = value
    return found


def join(weights: dict[str, Tensor], within: str, parts: Sequence[str], joined: str) -> None:
    """Make one layer of several that read the same, in place, by putting their rows together.

    Where one of them is missing or of another width, all stay as they are: `load_checkpoint` names
    them then.

    Args:
        weights: By asrkit's names, but for the parts.
        within: End of the name before the part, such as ".self_attention"; "" for every layer.
        parts: Names of the parts, in the order of their rows.
        joined: Name of the layer.
    """
    first = f"{within}.{parts[0]}."
    for name in [name for name in weights if first in name]:
        names = [name.replace(first, f"{within}.{part}.") for part in parts]
        found = [weights[one] for one in names if one in weights]
        if len(found) == len(parts) and _same_width(found):
            for one in names:
                del weights[one]
            weights[name.replace(first, f"{within}.{joined}.")] = torch.cat(found)


def _same_width(rows: Sequence[Tensor]) -> bool:
    """Whether tensors differ in their number of rows only."""
    width = rows[0].shape[1:]
    return all(one.ndim > 0 and one.shape[1:] == width for one in rows)


def drop_tied_output(weights: dict[str, Tensor], output: str) -> None:
    """Remove the weight of the output, in place, which is the embedding's.

    Args:
        weights: With the embedding by asrkit's name.
        output: Name of the output's weight; it may be missing.

    Raises:
        ValueError: The output has weights of its own.
    """
    tied = weights.pop(output, None)
    embedding = weights.get("embedding.weight")
    if tied is not None and embedding is not None:
        wanted = "the weights of the embedding, to which it is tied"
        expect(torch.equal(tied, embedding), output, wanted, "others")
