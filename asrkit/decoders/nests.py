"""Nests of tensors whose first dimension is the batch: what a prediction network may use as its
state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asrkit.shapes import expect


def nest_map(function: Callable[..., Tensor], *nests: Any) -> Any:
    """`function` of the tensors that stand at one place in every nest, as a nest: tuples, lists,
    dicts, None.
    """
    first = nests[0]
    if not all(_alike(first, nest) for nest in nests[1:]):
        expect(
            False,
            "state",
            "one structure throughout",
            " then ".join(type(nest).__name__ for nest in reversed(nests)),
        )
    if isinstance(first, Tensor):
        return function(*nests)
    if isinstance(first, dict):
        return {key: nest_map(function, *(nest[key] for nest in nests)) for key in first}
    expect(
        first is None or isinstance(first, tuple | list),
        "state",
        "tensors in tuples, lists or dicts",
        type(first).__name__,
    )
    if first is None:
        return None
    parts = [nest_map(function, *those) for those in zip(*nests, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def _alike(first: Any, other: Any) -> bool:
    """Whether two nests have the same places at their top."""
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys()
    if isinstance(first, tuple | list) and isinstance(other, tuple | list):
        return len(first) == len(other)
    return type(first) is type(other) or (isinstance(first, Tensor) and isinstance(other, Tensor))


def leaves(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in order."""
    found: list[Tensor] = []
    nest_map(lambda tensor: found.append(tensor) or tensor, nest)  # type: ignore[func-returns-value]
    return found


def choose(mask: Tensor, new: Any, old: Any) -> Any:
    """`new` where mask (B,) is true, else `old`, in every tensor of a nest; neither is broadcast."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        expect(
            a.shape == b.shape,
            "model.predict",
            f"shape {tuple(b.shape)}, as before",
            tuple(a.shape),
        )
        return torch.where(mask.view(-1, *[1] * (a.dim() - 1)), a, b)

    return nest_map(pick, new, old)
