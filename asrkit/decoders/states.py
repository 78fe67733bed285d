"""Predictor and language-model states: nested tuples, lists and dicts of tensors, batch first.

A state may hold None anywhere. Every function here walks one or more states of equal structure.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asrkit.shapes import expect


def map_state(function: Callable[..., Any], *states: Any) -> Any:
    """A state of the same structure whose tensors are `function` of the corresponding tensors.

    Args:
        function: Called with one tensor of each state, in the order of `states`.
        states: One or more states of equal structure.

    Raises:
        ValueError: A state holds something other than tensors and None.
    """
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: map_state(function, *(state[key] for state in states)) for key in first}
    known = isinstance(first, tuple | list)
    expect(known, "state", "tensors in tuples, lists or dicts", type(first).__name__)
    parts = [map_state(function, *items) for items in zip(*states, strict=True)]
    if hasattr(first, "_fields"):  # a named tuple takes its fields one by one
        return type(first)(*parts)
    return type(first)(parts)


def state_tensors(state: Any) -> list[Tensor]:
    """The tensors of a state as a list, in the order of the nest."""
    tensors: list[Tensor] = []
    map_state(tensors.append, state)
    return tensors


def select_state(mask: Tensor, new: Any, old: Any) -> Any:
    """The state of `new` for utterances where `mask` is true, of `old` for the others.

    Args:
        mask: (B,) bool.
        new: A state that the model has just returned.
        old: The state before, with the same structure and shapes; nothing is broadcast.

    Raises:
        ValueError: A tensor has different shapes in `new` and `old`.
    """

    def select(after: Tensor, before: Tensor) -> Tensor:
        wanted = f"shape {tuple(before.shape)}, as before"
        expect(after.shape == before.shape, "model.predict", wanted, tuple(after.shape))
        ones = [1] * (after.dim() - 1)
        return torch.where(mask.view(-1, *ones), after, before)

    return map_state(select, new, old)
