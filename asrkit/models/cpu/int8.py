"""Linear layers in int8 for inference on a CPU, by oneDNN.

Weights are quantized once, to signed numbers of 8 bits with a scale for each output (channel).
On a CPU without AVX-512 VNNI and AMX they have 7 bits, so that no sum overflows: there oneDNN or
FBGEMM adds pairs of products in 16 bits.
Activations are quantized in each call, to unsigned numbers of 8 bits with one scale and one zero
point for all rows of the call. A scale for each row would be finer, but torch's oneDNN layer takes
one scale a call: row scales would have to be multiplied after the product, which could then not
compute bias, SiLU and residual as well.

The numbers of an utterance depend a little on the rest of its batch, because they share a scale.

torch's FBGEMM computes the output layer of an attention decoder instead (`Int8Output`), whose
weight is large and whose rows are few: with AVX2, oneDNN packs a weight again in every call.
"""

import functools
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.compilers import compiled
from asrkit.cpu import sums_int8_in_32_bits
from asrkit.models.cpu.prepacked import ROWS, Activation, Prepacked
from asrkit.threads import eager

# Largest number of a weight, with sums in 32 bits and without. The range is symmetric: -128 stays
# unused. Two products of 255 and 64 fit into 16 bits. Fewer bits of activations lose more: for a
# trained FastConformer the error of its frames is 1.1 % in 8 bits, 1.3 % with weights of 7, and
# 2.2 % with activations of 7.
LARGEST_WEIGHT = {True: 127, False: 64}
F = np.float32
TINY = torch.finfo(torch.float32).tiny
TOP = 255  # levels of an activation, above the lowest
# Numbers that torch quantizes in a process before Numba does: 45 s of audio for a model of 110
# million weights. Numba takes a third of the time, but half a second to be loaded.
MOST_BY_TORCH = 2**26
BLOCK = 1024  # numbers that are widened to float32 at a time, in the first cache
_numbers_so_far = 0  # that this process has quantized
PATTERNS = {  # signed and unsigned integers of a dtype's size, and the bits it lacks to 32
    torch.bfloat16: (torch.int16, np.uint16, np.uint32(16)),
    torch.float32: (torch.int32, np.uint32, np.uint32(0)),
}


class Int8Linear(Prepacked):
    """`PrepackedLinear` in int8, from a weight (out, in) in float32 or bfloat16.

    Inputs and outputs have the dtype of the weight.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "none"
    ) -> None:
        super().__init__(None if bias is None else bias.float(), activation)
        self.dtype = weight.dtype
        values, self.weight_scale = quantize_weight(weight)
        out_features, in_features = weight.shape
        self.weight_zero = torch.zeros(out_features, dtype=torch.int64, device="cpu")
        self.weight = torch.ops.onednn.qlinear_prepack(values, [ROWS, in_features])

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) from (..., in)."""
        return torch.ops.onednn.qlinear_pointwise(
            *quantize(x),
            self.weight,
            self.weight_scale,
            self.weight_zero,
            self.bias,
            1.0,  # scale and zero point of the result, which is not quantized
            0,
            self.dtype,
            self.activation,
            [],
            "",
        )

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """(..., out): the layer, without activation, of x (..., in), plus `residual` (..., out)."""
        return torch.ops.onednn.qlinear_pointwise.binary(
            *quantize(x),
            self.weight,
            self.weight_scale,
            self.weight_zero,
            residual,
            self.bias,
            1.0,  # scale and zero point of the result; after the dtype, those of the residual
            0,
            self.dtype,
            1.0,
            0,
            "add",
            1.0,
            "none",
            [],
            "",
        )


class Int8Output(Prepacked):
    """A linear layer with a large weight (out, in) in int8, for few rows; it returns float32.

    Activations have one scale for each call, weights one for each output. Reading the weights takes
    most of the time, and int8 has a quarter of the bytes of float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        values, scale = quantize_weight(weight)
        zeros = torch.zeros(len(scale), dtype=torch.int64, device="cpu")
        with warnings.catch_warnings(action="ignore"):  # torch plans to replace such tensors
            quantized = torch._make_per_channel_quantized_tensor(values, scale.double(), zeros, 0)
        bias = None if self.bias is None else self.bias.float()
        self.packed = torch.ops.quantized.linear_prepack(quantized, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) float32 from (..., in)."""
        return torch.ops.quantized.linear_dynamic(x.float(), self.packed)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values (out, in) int8 and scale (out,) float32, whose product approximates the weight.

    The largest number of each output becomes 127 or -127, and without sums in 32 bits 64 or -64.
    """
    wide = weight.detach().float()
    largest = wide.abs().amax(1)
    scale = (largest / LARGEST_WEIGHT[sums_int8_in_32_bits()]).clamp(min=TINY)
    values = (wide / scale[:, None]).round()
    return values.to(torch.int8), scale


@eager
def quantize(x: Tensor) -> tuple[Tensor, float, int]:
    """Values (..., in) uint8, scale and zero point: activations are (values - zero) times scale.

    torch computes the values of the first `MOST_BY_TORCH` numbers of a process, then Numba the same
    ones on one thread, however many torch has. The lowest and the highest number become 0 and 255,
    or the steps next to them; where all numbers have one sign, zero is the other end of the range.
    Zero itself is exact, halves are rounded up, and no number changes by more than a step. The
    scale is NaN where an activation is not finite. The zero point is 1 to 255: with 0 oneDNN would
    bring the weight into its layout in each call.

    Args:
        x: Activations (..., in), float32 or bfloat16.
    """
    global _numbers_so_far
    by_torch = _numbers_so_far < MOST_BY_TORCH
    if by_torch:
        _numbers_so_far += x.numel()
        low, high = (end.item() for end in x.aminmax())
    else:
        ends, levels = _kernels()
        signed_dtype, unsigned_dtype, shift = PATTERNS[x.dtype]
        signed = x.contiguous().view(signed_dtype).numpy().reshape(-1)
        unsigned = signed.view(unsigned_dtype)
        low, high = ends(signed, unsigned, shift)
    # Python's min and max keep a NaN that comes first
    low = min(low, 0.0)
    scale = max((max(high, 0.0) - low) / TOP, TINY)
    if not math.isfinite(scale):
        return torch.zeros_like(x, dtype=torch.uint8), math.nan, 1
    zero = min(max(int(0.5 - low / scale), 1), TOP)
    if by_torch:
        # by int16, since torch converts floats to uint8 without vector code: six times as long
        numbers = (x.float() * (1 / scale)).add_(zero + 0.5).clamp_(0, TOP)
        return numbers.to(torch.int16).to(torch.uint8), scale, zero
    values = np.empty(unsigned.size, np.uint8)
    levels(unsigned, shift, F(1 / scale), F(zero + 0.5), values)
    return torch.from_numpy(values).view(x.shape), scale, zero


@functools.cache
def _kernels() -> tuple[Any, Any]:
    return compiled(_ends), compiled(_levels)


def _ends(signed, unsigned, shift):
    """The lowest and the highest of n numbers, or of these and 0, by their bit patterns.

    Among signed integers the largest is the pattern of the highest positive number, among unsigned
    ones that of the lowest negative number. The patterns of infinity and NaN are larger than those
    of all numbers, so it finds them too.

    Args:
        signed: Bit patterns of the numbers (n,), as signed integers.
        unsigned: The same patterns as unsigned integers.
        shift: Bits that these lack to a float32.
    """
    highest = signed.dtype.type(0)
    lowest = unsigned.dtype.type(0)
    for i in range(signed.size):
        highest = max(highest, signed[i])
        lowest = max(lowest, unsigned[i])
    ends = np.empty(2, np.uint32)
    ends[0] = np.uint32(lowest) << shift
    ends[1] = np.uint32(highest) << shift
    floats = ends.view(F)
    return floats[0], floats[1]


def _levels(patterns, shift, steps, shifted, into):
    """Quantize n numbers into `into`.

    Args:
        patterns: Bit patterns of the numbers (n,), as unsigned integers.
        shift: Bits that these lack to a float32.
        steps: Steps in 1, the reciprocal of the scale.
        shifted: The zero point and a half.
        into: Quantized numbers (n,) uint8, which are written.
    """
    wide = np.empty(BLOCK, np.uint32)
    numbers = wide.view(F)
    for start in range(0, patterns.size, BLOCK):
        count = min(BLOCK, patterns.size - start)
        part = patterns[start : start + count]  # with i alone as index, loops become vector code
        levels = into[start : start + count]
        for i in range(count):
            wide[i] = np.uint32(part[i]) << shift
        for i in range(count):
            level = min(numbers[i] * steps + shifted, F(TOP))
            levels[i] = np.uint8(np.int32(level))
