"""Activations quantized to 8 bits in two passes over memory, compiled for the CPU.

The first pass finds the lowest and the highest number by their bit patterns, as integers: read as
signed integers, the largest is the pattern of the highest positive number; read as unsigned ones,
the largest is that of the lowest negative number. The patterns of infinity and NaN are larger than
those of all numbers, so they are found too.
"""

import numpy as np
import torch
from torch import Tensor

from asrkit.models.int8 import LEVELS, QuantizedRows
from asrkit.runtime import compiled, eager

F = np.float32
TINY = F(np.finfo(F).tiny)
HALF = F(0.5)
TOP = F(LEVELS)
BLOCK = 1024  # numbers that are widened to float32 at a time, in the first cache
PATTERNS = {  # signed and unsigned integers of a dtype's size, and what that lacks to 32 bits
    torch.bfloat16: (torch.int16, np.uint16, np.uint32(16)),
    torch.float32: (torch.int32, np.uint32, np.uint32(0)),
}


@eager
def quantize(x: Tensor) -> QuantizedRows:
    """Activations (..., in), float32 or bfloat16, in 8 bits, by one thread, however many torch has.

    The lowest and the highest number become 0 and 255, or the steps next to them; where all lie on
    one side of zero, zero takes the place of the other end. Zero itself is exact. Halves are
    rounded up. No number is more than a step away from what it was.
    """
    signed_dtype, unsigned_dtype, shift = PATTERNS[x.dtype]
    signed = x.contiguous().view(signed_dtype).numpy().reshape(-1)
    values = np.empty(signed.size, np.uint8)
    scale, zero = _quantize(signed, signed.view(unsigned_dtype), shift, values)
    return QuantizedRows(torch.from_numpy(values).view(x.shape), scale, zero)


def _kernel(signed, unsigned, shift, into):
    """Scale and zero point of n numbers, which are written to `into` (n,) uint8.

    Args:
        signed: Their bit patterns (n,), as signed integers.
        unsigned: The same as unsigned integers.
        shift: Bits that these lack to a float32.
        into: What is written.
    """
    highest = signed.dtype.type(0)
    lowest = unsigned.dtype.type(0)
    for i in range(signed.size):
        highest = max(highest, signed[i])
        lowest = max(lowest, unsigned[i])
    ends = np.empty(2, np.uint32)
    ends[0] = np.uint32(highest) << shift
    ends[1] = np.uint32(lowest) << shift
    floats = ends.view(F)
    above = floats[0]
    below = min(floats[1], F(0.0))
    scale = (above - below) / TOP
    if not np.isfinite(scale):
        into[:] = 0
        return np.nan, 1
    scale = max(scale, TINY)
    steps = F(1.0) / scale
    zero = np.floor(-below * steps + HALF)
    zero = min(max(zero, F(1.0)), TOP)
    shifted = zero + HALF
    patterns = np.empty(BLOCK, np.uint32)
    numbers = patterns.view(F)
    for start in range(0, unsigned.size, BLOCK):
        count = min(BLOCK, unsigned.size - start)
        part = unsigned[start : start + count]  # an index of i alone lets loops become vector code
        levels = into[start : start + count]
        for i in range(count):
            patterns[i] = np.uint32(part[i]) << shift
        for i in range(count):
            level = min(numbers[i] * steps + shifted, TOP)
            levels[i] = np.uint8(np.int32(level))
    return float(scale), int(zero)


# error_model: a check for division by zero would keep loops from becoming vector code
_quantize = compiled(_kernel, error_model="numpy")
