"""Feed-forwards in floats of 8 bits (e4m3), if asked for: half the bytes of bfloat16, and on Hopper
twice the rate of products.

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
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=TINY)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def silu_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` of silu(x)."""
    return quantize(F.silu(x.float()))


def scaled_product(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """bfloat16 rows (..., out) of e4m3 rows (..., D) and an e4m3 weight (out, D), each row times
    its scale.
    """
    return F.linear(
        x.float() * scale, weight.float() * weight_scale, None if bias is None else bias.float()
    ).bfloat16()


def scaled_product_on_cuda(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """The same by torch's product of 8-bit floats, whose sums are float32."""
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
        sizes = linear.in_features, linear.out_features
        expect(
            all(size % 16 == 0 for size in sizes),
            "feed_forward",
            "widths that 16 divides with 'float8'",
            sizes,
        )
        expect(
            linear.weight.dtype == torch.bfloat16,
            "feed_forward",
            "a model in bfloat16 with 'float8'",
            linear.weight.dtype,
        )
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
