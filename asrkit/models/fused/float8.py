"""Feed-forwards in 8-bit floats (e4m3), on request.

They take half the bytes of bfloat16, and on Hopper products have twice the rate.

A row of numbers is divided by its scale, so that the largest becomes LARGEST; e4m3 then keeps four
significant binary digits. Rows of activations get their scales in every call, rows of weights (one
for each output) once. On a CPU the same arithmetic is emulated. Neither time nor loss of accuracy
is measured yet.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.shapes import expect

LARGEST = 448.0  # of e4m3, which has no infinity
TINY = 1e-12  # the least scale: a row of zeros stays one


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., D) over their scales in e4m3, and the scales (..., 1) in float32."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = (largest / LARGEST).clamp(min=TINY)
    scaled = (wide / scale).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn), scale


def silu_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` of silu(x)."""
    return quantize(F.silu(x.float()))


def scaled_product(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """The product of quantized rows and a quantized weight, (..., out) in bfloat16.

    Args:
        x: Rows (..., D) in e4m3.
        scale: Their scales (..., 1), float32.
        weight: A weight (out, D) in e4m3.
        weight_scale: Scales of its rows (out, 1), float32.
        bias: A bias (out,), or None.
    """
    rows = x.float() * scale
    weights = weight.float() * weight_scale
    if bias is not None:
        bias = bias.float()
    return F.linear(rows, weights, bias).bfloat16()


def scaled_product_on_cuda(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """`scaled_product` by torch's product of 8-bit floats, whose sums are float32.

    Args:
        x: Rows (..., D) in e4m3.
        scale: Their scales (..., 1), float32.
        weight: A weight (out, D) in e4m3.
        weight_scale: Scales of its rows (out, 1), float32.
        bias: A bias (out,), or None.
    """
    rows = torch._scaled_mm(
        x.flatten(0, -2),
        weight.t(),
        scale.flatten(0, -2),
        weight_scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
    )
    return rows.view(*x.shape[:-1], -1)


class Float8Linear(nn.Module):
    """A linear layer whose weight is quantized now."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: Any) -> None:
        super().__init__()
        sizes = (linear.in_features, linear.out_features)
        divided = all(size % 16 == 0 for size in sizes)
        expect(divided, "feed_forward", "widths that 16 divides with 'float8'", sizes)
        dtype = linear.weight.dtype
        wanted = "a model in bfloat16 with 'float8'"
        expect(dtype == torch.bfloat16, "feed_forward", wanted, dtype)
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        bias = linear.bias
        if bias is not None:
            bias = bias.detach()
        self.register_buffer("bias", bias)
