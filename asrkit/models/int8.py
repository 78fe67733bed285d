"""Linear layers in int8 for inference on a CPU, by oneDNN.

Weights are quantized once: signed numbers of 8 bits with a scale for each output (channel).
Activations are quantized in each call: unsigned numbers of 8 bits with one scale and one zero point
for all rows of the call. Per row would be finer, but torch's oneDNN layer takes one scale a call: a
scale for each row would have to be multiplied behind the product, so bias, SiLU and residual could
not be parts of it any more. Sums of products are int32, so none overflows.

Numbers of an utterance depend a little on what else is in its batch: the scale is that of all.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.cpu import expect_int8, fast_dtype
from asrkit.models.packed import ROWS, Packed

LARGEST_WEIGHT = 127  # -128 stays unused, so that weights lie around zero
LEVELS = 255  # of an activation, above the lowest
Activation = Literal["none", "relu", "swish"]  # swish: oneDNN's name of SiLU


class QuantizedWeight(NamedTuple):
    """A weight is values times scale."""

    values: Tensor  # (out, in) int8
    scale: Tensor  # (out,) float32


class QuantizedRows(NamedTuple):
    """Activations are (values - zero) times scale."""

    values: Tensor  # (..., in) uint8
    scale: float  # NaN where an activation, or how far they lie apart, is not finite
    zero: int  # 1 to 255; never 0, for which oneDNN would lay the weight out anew in each call


def loaded_dtype(name: str) -> str:
    """Name of the dtype to load a model in that is to compute in `name`.

    What is not in int8 is in the dtype that the CPU multiplies fastest.

    Args:
        name: "int8", or that of a dtype of torch, which is returned.

    Raises:
        ValueError: int8 on a CPU without instructions for it.
    """
    if name != "int8":
        return name
    expect_int8()
    return fast_dtype()


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """A weight (out, in) in int8; the largest number of an output becomes 127 or -127."""
    wide = weight.detach().float()
    largest = wide.abs().amax(1)
    scale = (largest / LARGEST_WEIGHT).clamp(min=torch.finfo(torch.float32).tiny)
    values = (wide / scale[:, None]).round()
    return QuantizedWeight(values.to(torch.int8), scale)


class Int8Linear(Packed):
    """`asrkit.models.packed.PackedLinear` in int8: takes and returns the dtype of `linear`.

    Args:
        linear: In float32 or bfloat16.
        activation: Behind the layer.
    """

    def __init__(self, linear: nn.Linear, activation: Activation = "none") -> None:
        super().__init__()
        from asrkit.models.int8_numba_cpu import quantize

        self.quantize = quantize
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.activation = activation
        self.dtype = linear.weight.dtype
        values, self.weight_scale = quantize_weight(linear.weight)
        self.weight_zero = torch.zeros(self.out_features, dtype=torch.int64)
        self.weight = torch.ops.onednn.qlinear_prepack(values, [ROWS, self.in_features])
        self.bias: Tensor | None = None
        if linear.bias is not None:
            self.bias = linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in)."""
        rows = self.quantize(x)
        return torch.ops.onednn.qlinear_pointwise(
            rows.values,
            rows.scale,
            rows.zero,
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
        rows = self.quantize(x)
        return torch.ops.onednn.qlinear_pointwise.binary(
            rows.values,
            rows.scale,
            rows.zero,
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
