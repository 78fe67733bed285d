"""Large CPU tensors on huge pages.

Filling a gradient the size of the joint costs more in page faults than in arithmetic.
"""

import ctypes
import sys

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes
MADV_HUGEPAGE = 14


def empty_like(tensor: Tensor) -> Tensor:
    """torch.empty_like, contiguous; on Linux a large CPU tensor asks for huge pages (madvise)."""
    made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    is_large = made.nbytes > 16 * HUGE_PAGE
    if made.device.type == "cpu" and sys.platform == "linux" and is_large:
        start = -(-made.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = (made.data_ptr() + made.nbytes - start) // HUGE_PAGE * HUGE_PAGE
        # advice, which the kernel may ignore
        address = ctypes.c_void_p(start)
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(size), MADV_HUGEPAGE)
    return made
