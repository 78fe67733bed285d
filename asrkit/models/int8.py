"""Linear layers in int8 for inference on a CPU, by oneDNN.

Weights are quantized once: signed numbers of 8 bits with a scale for each output (channel).
Activations are quantized in each call: unsigned numbers of 8 bits with one scale and one zero point
for all rows of the call. Per row would be finer, but torch's oneDNN layer takes one scale a call: a
scale for each row would have to be multiplied behind the product, so bias, SiLU and residual could
not be parts of it any more. Sums of products are int32, so none overflows.

Numbers of an utterance depend a little on what else is in its batch: the scale is that of all.

The output layer of an attention decoder, whose weight is large and whose rows are few, is computed
by torch's FBGEMM instead (`Int8Output`), which needs no more than AVX2.
"""

import functools
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.compilers import compiled
from asrkit.cpu import fast_dtype, has_int8
from asrkit.models.packed import ROWS, Activation, Packed
from asrkit.threads import eager

LARGEST_WEIGHT = 127  # -128 stays unused, so that weights lie around zero
F = np.float32
TINY = np.finfo(F).tiny
HALF = F(0.5)
TOP = F(255)  # levels of an activation, above the lowest
BLOCK = 1024  # numbers that are widened to float32 at a time, in the first cache
PATTERNS = {  # signed and unsigned integers of a dtype's size, and what that lacks to 32 bits
    torch.bfloat16: (torch.int16, np.uint16, np.uint32(16)),
    torch.float32: (torch.int32, np.uint32, np.uint32(0)),
}


def loaded_dtype(name: str) -> str:
    """Name of the dtype to load a model in that is to compute in `name`.

    What is not in int8 is in the dtype that the CPU multiplies fastest.

    Args:
        name: "int8", or that of a dtype of torch, which is returned.
    """
    return fast_dtype() if name == "int8" else name


class Int8Linear(Packed):
    """`asrkit.models.packed.PackedLinear` in int8, of a weight (out, in) in float32 or bfloat16.

    It takes and returns the dtype of the weight.
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
        """(..., out) of (..., in)."""
        return torch.ops.onednn.qlinear_pointwise(
            *quantize(x),
            self.weight,
            self.weight_scale,
            self.weight_zero,
            self.bias,
            1.0,  # scale and zero point of the result, which is no integer
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
            1.0,  # scale and zero point of the result, and then of the residual
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


class Int8Output(Packed):
    """A linear layer with a large weight (out, in) in int8, for few rows; it returns float32.

    Activations have one scale a call, weights one an output. The weights are what takes time: a
    quarter of the bytes of float32 are read. Without VNNI pairs of products are added in 16 bits:
    activations then have 7 bits, so that none overflows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        values, scale = quantize_weight(weight)
        zeros = torch.zeros(len(scale), dtype=torch.int64, device="cpu")
        with warnings.catch_warnings(action="ignore"):  # torch means to replace such tensors
            quantised = torch._make_per_channel_quantized_tensor(values, scale.double(), zeros, 0)
        bias = None if self.bias is None else self.bias.float()
        self.packed = torch.ops.quantized.linear_prepack(quantised, bias)
        self.seven_bits = not has_int8()

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) float32 of (..., in)."""
        return torch.ops.quantized.linear_dynamic(x.float(), self.packed, self.seven_bits)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values (out, in) int8 and scale (out,) float32, whose product is nearly a weight (out, in).

    The largest number of an output becomes 127 or -127.
    """
    wide = weight.detach().float()
    largest = wide.abs().amax(1)
    scale = (largest / LARGEST_WEIGHT).clamp(min=float(TINY))
    values = (wide / scale[:, None]).round()
    return values.to(torch.int8), scale


@eager
def quantize(x: Tensor) -> tuple[Tensor, float, int]:
    """Values (..., in) uint8, scale and zero of activations, which are (values - zero) times scale.

    By one thread, however many torch has. The lowest and the highest number become 0 and 255, or
    the steps next to them; where all lie on one side of zero, zero takes the place of the other
    end. Zero itself is exact. Halves are rounded up. No number is more than a step away from what
    it was. The scale is NaN where an activation, or how far they lie apart, is not finite. The zero
    is 1 to 255, never 0, for which oneDNN would lay the weight out anew in each call.

    Args:
        x: Activations (..., in), float32 or bfloat16.
    """
    signed_dtype, unsigned_dtype, shift = PATTERNS[x.dtype]
    signed = x.contiguous().view(signed_dtype).numpy().reshape(-1)
    values = np.empty(signed.size, np.uint8)
    scale, zero = _kernel()(signed, signed.view(unsigned_dtype), shift, values)
    return torch.from_numpy(values).view(x.shape), scale, zero


@functools.cache
def _kernel() -> Any:
    # error_model: a check for division by zero would keep loops from becoming vector code
    return compiled(_quantize, error_model="numpy")


def _quantize(signed, unsigned, shift, into):
    """Scale and zero point of n numbers, which are written to `into` (n,) uint8.

    Two passes over memory. The first finds the lowest and the highest number by their bit patterns:
    read as signed integers, the largest is the pattern of the highest positive number; read as
    unsigned ones, the largest is that of the lowest negative number. The patterns of infinity and
    NaN are larger than those of all numbers, so they are found too.

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
