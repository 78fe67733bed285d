"""A large CPU tensor on huge pages: a gradient the size of the joint costs more in page faults than
in arithmetic.
"""

import ctypes
import sys

import torch
from torch import Tensor

HUGE = 2 << 20
MADV_HUGEPAGE = 14


def empty_like(tensor: Tensor) -> Tensor:
    """torch.empty_like, contiguous; on Linux, where huge pages are asked for (`madvise`), a large
    one gets them.
    """
    made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if made.device.type == "cpu" and sys.platform == "linux" and made.nbytes > 16 * HUGE:
        start = -(-made.data_ptr() // HUGE) * HUGE
        size = (made.data_ptr() + made.nbytes - start) // HUGE * HUGE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE
        )  # advice: may be refused
    return made
