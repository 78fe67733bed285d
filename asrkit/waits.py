"""Which ops make the CPU wait for a GPU: those that decide a value or a size in Python. A CUDA graph cannot hold them."""

from typing import Any

import torch

DECIDES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}


def op_name(func: Any) -> str:
    """The name of an op that a TorchDispatchMode sees, without namespace and overload."""
    return func._schema.name.partition("::")[2]


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call of an op reads from the GPU what Python needs to go on; copies between devices are left out."""
    if op_name(func) in INDEXING:
        return _masks(args)
    return bool(DECIDES & set(func.tags)) and kwargs.get("output_size") is None


def _masks(args: Any) -> bool:
    """Whether indices hold a boolean mask, which is turned into positions first: their number is not known before."""
    indices = [index for index in args[1] if index is not None]
    if not any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return False
    return not (len(args) > 2 and args[2].numel() == 1 and len(indices) == 1)  # x[mask] = scalar becomes masked_fill
