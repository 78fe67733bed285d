"""Every op on its way to a device, and the line of Python that asked for it: the one way in which
this room looks at torch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit.runtime import op_name

ROOT, ROOM, TORCH = (
    Path(__file__).resolve().parents[3],
    Path(__file__).parent,
    Path(torch.__file__).parent,
)
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
    """Hands every op that reaches a device to `op`, which runs it; what is made of other ops is
    taken apart first.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about metadata
            return func(*args, **kwargs)
        with self:  # in inference mode ops arrive whole that are made of others
            parts = func.decompose(*args, **kwargs)
        return self.op(func, args, kwargs) if parts is NotImplemented else parts

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op, and return its result."""
        raise NotImplementedError


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def works(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an op has a device read or write anything: not so views, metadata, unfilled memory,
    and tensors without elements.
    """
    return (
        op_name(func) not in MEMORY | VIEWS
        and not func.is_view
        and any(tensor.numel() for tensor in made or given)
    )


def caller() -> str:
    """ "file:line" of the nearest frame that belongs neither to torch nor to this room."""
    frame = sys._getframe(1)
    while frame.f_back and any(
        Path(frame.f_code.co_filename).is_relative_to(folder) for folder in (ROOM, TORCH)
    ):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name}:{frame.f_lineno}"
