"""Ops that make the CPU wait for a GPU, and a guard against them for CUDA graphs."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Tags of ops whose result, or its size, Python has to fetch from the device.
FETCHED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Ops that wait only where an index is a boolean mask: the device alone knows how many positions it
# selects.
INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_unsafe_index",
    "_unsafe_index_put",
    "_index_put_impl_",
}


def op_name(func: Any) -> str:
    """Name of an op that a TorchDispatchMode intercepts, without namespace and overload."""
    return func._schema.name.partition("::")[2]


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an op makes Python wait for a value or a size from the GPU.

    Copies between devices do not count.

    Args:
        func: The op, as a TorchDispatchMode intercepts it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if op_name(func) in INDEXING:
        indices = [index for index in args[1] if index is not None]
        has_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        # x[mask] = scalar becomes masked_fill
        assigns_scalar = len(args) > 2 and args[2].numel() == 1 and len(indices) == 1
        return has_mask and not assigns_scalar
    return bool(FETCHED & set(func.tags)) and kwargs.get("output_size") is None


class CaptureGuard(TorchDispatchMode):
    """Raises RuntimeError at an op that a CUDA graph cannot hold, before a capture begins.

    Such an op takes a value or a size from the device to Python. A capture that fails there may
    leave torch in a bad state.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(func, args, kwargs):
            raise RuntimeError(f"{func} waits for the GPU")
        with self:  # inference mode passes composite ops undecomposed
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            return func(*args, **kwargs)
        return result
