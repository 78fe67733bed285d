"""Nests of tensors whose first dimension is the batch: what a prediction network may use as its state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asrkit.shapes import expect


def nest_map(function: Callable[..., Tensor], *nests: Any) -> Any:
    """`function` of the tensors that stand at one place in every nest, as a nest: tuples, lists, dicts, None."""
    first = nests[0]
    if isinstance(first, Tensor):
        return function(*nests)
    if isinstance(first, dict):
        return {key: nest_map(function, *(nest[key] for nest in nests)) for key in first}
    expect(first is None or isinstance(first, tuple | list), "state", "tensors in tuples, lists or dicts", type(first).__name__)
    if first is None:
        return None
    parts = [nest_map(function, *those) for those in zip(*nests, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def leaves(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in order."""
    found: list[Tensor] = []
    nest_map(lambda tensor: found.append(tensor) or tensor, nest)  # type: ignore[func-returns-value]
    return found


def choose(mask: Tensor, new: Any, old: Any) -> Any:
    """`new` where mask (B,) is true, else `old`, in every tensor of a nest."""
    return nest_map(lambda a, b: torch.where(mask.view(-1, *[1] * (a.dim() - 1)), a, b), new, old)
