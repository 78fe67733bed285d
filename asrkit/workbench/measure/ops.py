"""Every op on its way to a device, and the line of Python that asked for it.

All counting and timing of ops in this room goes through `EachOp`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit.runtime import op_name

ROOT = Path(__file__).resolve().parents[3]
ROOM = Path(__file__).parent
TORCH = Path(torch.__file__).parent
MEMORY = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
}
VIEWS = {
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "detach_",
    "is_pinned",
    "record_stream",
    "_local_scalar_dense",
}


class EachOp(TorchDispatchMode):
    """Calls `op` for every op that reaches a device; composite ops are decomposed first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about metadata
            return func(*args, **kwargs)
        with self:  # in inference mode ops arrive whole that are made of others
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        return self.op(func, args, kwargs)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op; returns its result.

        Args:
            func: The op.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        raise NotImplementedError


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def works(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether an op makes a device read or write anything.

    Views, metadata, unfilled memory and tensors without elements do not.

    Args:
        func: The op.
        inputs: Tensors among its arguments.
        outputs: Tensors among its results.
    """
    if func.is_view or op_name(func) in MEMORY | VIEWS:
        return False
    return any(tensor.numel() for tensor in outputs or inputs)


def caller() -> str:
    """ "file:line" of the nearest frame that belongs neither to torch nor to this room."""
    frame = sys._getframe(1)
    path = Path(frame.f_code.co_filename)
    while frame.f_back and (path.is_relative_to(ROOM) or path.is_relative_to(TORCH)):
        frame = frame.f_back
        path = Path(frame.f_code.co_filename)
    name = path.name
    if path.is_relative_to(ROOT):
        name = path.relative_to(ROOT).as_posix()
    return f"{name}:{frame.f_lineno}"
