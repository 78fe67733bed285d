"""A cache of one tensor that inference computes from a weight alone.

Only `asrkit.models.optimize` uses it, on a CPU, after which no weight may change. `WeightCache`
notices most changes all the same.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

# Larger tensors are not cached: every layer of a model has a cache of its own.
MAX_ELEMENTS = 2**21


class WeightCache:
    """The last value computed from a weight; never copied, saved or moved with its module.

    A weight is recognised by its memory and by torch's count of changes in place
    (`Tensor._version`), which load_state_dict and edits under no_grad raise. A fused optimizer does
    not raise it, nor does an edit through `weight.data`, by which averages of weights are often
    swapped in. So a model as it was built caches nothing.
    """

    def __init__(self) -> None:
        self._held: tuple[Any, ...] | None = None

    def value(self, weight: Any, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, or what it returned the last time if `weight` and `key` are the same.

        Args:
            weight: The weight that the value is computed from.
            key: What else the value depends on.
            make: Computes the value.
        """
        if not may_cache(weight):
            return make()
        held = self._held  # read once: another thread may change it
        if held is not None:
            known, version, held_key, value = held
            if _same(known, weight) and version == weight._version and held_key == key:
                return value
        value = make()
        known = weight
        if not weight.is_mkldnn:
            # Keeps the old memory alive: no other weight can come to lie where this one was.
            known = weight.detach()
        if value.numel() <= MAX_ELEMENTS:
            self._held = (known, weight._version, key, value)
        else:
            self._held = None
        return value

    def __deepcopy__(self, memo: Any) -> "WeightCache":
        return WeightCache()

    def __getstate__(self) -> dict[str, None]:
        return {"_held": None}


def _same(known: Tensor, weight: Tensor) -> bool:
    if weight.is_mkldnn:  # packed: its memory has no address, and nobody edits it
        return known is weight
    return (
        known.data_ptr() == weight.data_ptr()
        and known.dtype == weight.dtype
        and known.shape == weight.shape
    )


def may_cache(weight: Any) -> bool:
    """Whether a value computed from `weight` may outlive this call.

    Not where it is part of a gradient, of a program that is being compiled, or of a region of
    autocast; and not of weights whose changes are not counted: those made in inference mode, and
    those without memory.
    """
    if type(weight) not in (Tensor, torch.nn.Parameter):  # a quantizer's layer
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled(weight.device.type):
        return False
    return not weight.is_inference()
