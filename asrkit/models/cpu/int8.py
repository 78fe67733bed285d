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
TINY = np.finfo(F).tiny
HALF = F(0.5)
TOP = F(255)  # levels of an activation, above the lowest
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
    scale = (largest / LARGEST_WEIGHT[sums_int8_in_32_bits()]).clamp(min=float(TINY))
    values = (wide / scale[:, None]).round()
    return values.to(torch.int8), scale


@eager
def quantize(x: Tensor) -> tuple[Tensor, float, int]:
    """Values (..., in) uint8, scale and zero point: activations are (values - zero) times scale.

    torch computes the first `MOST_BY_TORCH` numbers of a process, then Numba the same values on one
    thread, however many torch has. The lowest and the highest number become 0 and 255, or the steps
    next to them; where all numbers have one sign, zero is the other end of the range. Zero itself
    is exact, halves are rounded up, and no number changes by more than a step. The scale is NaN
    where an activation, or the range of all, is not finite. The zero point is 1 to 255: with 0
    oneDNN would bring the weight into its layout in each call.

    Args:
        x: Activations (..., in), float32 or bfloat16.
    """
    global _numbers_so_far
    if _numbers_so_far < MOST_BY_TORCH:
        _numbers_so_far += x.numel()
        return _quantized_by_torch(x)
    signed_dtype, unsigned_dtype, shift = PATTERNS[x.dtype]
    signed = x.contiguous().view(signed_dtype).numpy().reshape(-1)
    values = np.empty(signed.size, np.uint8)
    scale, zero = _kernel()(signed, signed.view(unsigned_dtype), shift, values)
    return torch.from_numpy(values).view(x.shape), scale, zero


def _quantized_by_torch(x: Tensor) -> tuple[Tensor, float, int]:
    lowest, highest = (end.float() for end in x.aminmax())
    below = lowest.clamp(max=0.0)
    scale = (highest.clamp(min=0.0) - below) / float(TOP)
    if not scale.isfinite():
        return torch.zeros_like(x, dtype=torch.uint8), np.nan, 1
    scale = scale.clamp(min=float(TINY))
    steps = 1 / scale
    zero = (-below * steps + 0.5).floor().clamp(1, 255)
    levels = (x.float() * steps).add_(zero + 0.5).clamp_(0, 255)
    return levels.to(torch.uint8), scale.item(), int(zero)


@functools.cache
def _kernel() -> Any:
    # error_model: a check for division by zero would prevent vector code
    return compiled(_quantize, error_model="numpy")


def _quantize(signed, unsigned, shift, into):
    """Quantize n numbers into `into`, and return their scale and zero point.

    Two passes over memory. The first finds the lowest and the highest number by their bit patterns:
    among signed integers the largest is the pattern of the highest positive number, among unsigned
    ones that of the lowest negative number. The patterns of infinity and NaN are larger than those
    of all numbers, so the pass finds them too.

    Args:
        signed: Bit patterns of the numbers (n,), as signed integers.
        unsigned: The same patterns as unsigned integers.
        shift: Bits that these lack to a float32.
        into: Quantized numbers (n,) uint8, which are written.
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
        part = unsigned[start : start + count]  # with i alone as index, loops become vector code
        levels = into[start : start + count]
        for i in range(count):
            patterns[i] = np.uint32(part[i]) << shift
        for i in range(count):
            level = min(numbers[i] * steps + shifted, TOP)
            levels[i] = np.uint8(np.int32(level))
    return float(scale), int(zero)
