"""Memory of large gradients on a CPU, kept from one call of a loss to the next.

The first touch of fresh memory costs a page fault for each page of 4 KiB. For a gradient the size
of the joint that takes longer than its arithmetic. malloc reuses blocks of up to 32 MiB by itself;
here one larger block is kept. It is lent to one gradient at a time: while any tensor lies in it,
the next gradient gets memory of its own.
"""

import weakref
from collections import deque

import torch
from torch import Tensor

from asrkit.runtime import KEPT_MEMORY

LARGE = 32 << 20  # bytes up to which malloc reuses memory (glibc's largest mmap threshold)

_kept: deque[Tensor] = deque(maxlen=1)  # its append and pop are safe between threads


def empty_like(tensor: Tensor) -> Tensor:
    """torch.empty_like, contiguous; a large CPU tensor may lie in memory of an earlier one."""
    if tensor.device.type != "cpu" or tensor.nbytes <= LARGE:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    block = _take(tensor.nbytes)
    view = block.numpy()
    returned = weakref.finalize(view, _kept.append, block)
    returned.atexit = False
    # The storage owns `view`, so it ends with the last tensor that uses the storage.
    storage = torch.from_numpy(view).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage).resize_(tensor.shape)


def release() -> None:
    """Free the memory that is kept for the next large gradient."""
    _kept.clear()


KEPT_MEMORY.append(release)


def _take(size: int) -> Tensor:
    """The kept block where it has `size` bytes, else a new one, uint8."""
    try:
        block = _kept.pop()
    except IndexError:
        return torch.empty(size, dtype=torch.uint8)
    if block.nbytes >= size:
        return block
    del block  # before more is asked for
    return torch.empty(size, dtype=torch.uint8)
