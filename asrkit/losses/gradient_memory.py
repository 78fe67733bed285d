"""Memory for large gradients on a CPU, reused from one gradient to the next.

The first touch of fresh memory costs a page fault for each page of 4 KiB. For a gradient as large
as the joint, that takes longer than its arithmetic. malloc reuses blocks of up to 32 MiB itself, so
this file keeps one larger block. Only one gradient at a time uses the block; while any tensor still
uses it, the next gradient gets memory of its own.
"""

import weakref
from collections import deque

import torch
from torch import Tensor

from asrkit.memory import KEPT_MEMORY

LARGE = 32 << 20  # bytes up to which malloc reuses memory (glibc's largest mmap threshold)
_kept: deque[Tensor] = deque(maxlen=1)  # append and pop are safe between threads


def empty_like(tensor: Tensor) -> Tensor:
    """Return torch.empty_like of a contiguous tensor; a large one may reuse the kept block."""
    if tensor.device.type != "cpu" or tensor.nbytes <= LARGE:
        return torch.empty_like(tensor)
    try:
        block = _kept.pop()
    except IndexError:
        block = torch.empty(0, dtype=torch.uint8, device="cpu")
    if block.nbytes < tensor.nbytes:
        del block  # frees it before the larger one is allocated
        block = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    view = block.numpy()
    returned = weakref.finalize(view, _kept.append, block)
    returned.atexit = False
    # The storage owns `view`, so `view` dies with the last tensor that uses the storage.
    storage = torch.from_numpy(view).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage).resize_(tensor.shape)


def release_gradient_memory() -> None:
    """Free the memory that is kept for the next large gradient."""
    _kept.clear()


KEPT_MEMORY.append(release_gradient_memory)
