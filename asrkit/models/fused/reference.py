"""What the fused kernels compute, step by step in plain torch: to be read, and what the kernels are
held to.

Inside, every function computes in the dtype of its float32 (or float64) arguments and rounds once,
when it returns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from asrkit.shapes import valid_mask


def add_norm(
    x: Tensor, y: Tensor, scale: float, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + scale y and the layer norm of that, of rows (..., D)."""
    total = _wide(x) + scale * _wide(y)
    return total.to(x.dtype), _layer_norm(total, weight, bias, eps).to(x.dtype)


def add_norm_twice(
    x: Tensor,
    y: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor,
    next_eps: float,
) -> tuple[Tensor, Tensor]:
    """The layer norm of x + scale y, with which a block ends, and the layer norm of that, with
    which the next begins.
    """
    first = _layer_norm(_wide(x) + scale * _wide(y), weight, bias, eps)
    return first.to(x.dtype), _layer_norm(first, next_weight, next_bias, next_eps).to(x.dtype)


def gated_conv(gate: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A block's convolution (B, T, D) of its gate (B, T, 2D): GLU, mask, depthwise convolution over
    time, SiLU.

    Weight (K, D) and bias (D,) hold the batch norm too, in float32.
    """
    K, D = weight.shape
    x = F.glu(gate.to(weight.dtype), -1)
    x = x.masked_fill(~valid_mask(lengths, x.shape[1])[..., None], 0.0)
    x = F.conv1d(x.transpose(1, 2), weight.T[:, None], bias, padding=K // 2, groups=D)
    return F.silu(x).transpose(1, 2).to(gate.dtype).contiguous()


def position_bias(
    scores: Tensor, constant: Tensor, lengths: Tensor, left: int, right: int
) -> Tensor:
    """What attention adds to its scores: (B, H, T, T), from products of q with positions (H, B, T,
    T), frame by frame.

    constant (H, 2T): what every frame of a head adds at a distance of T, T - 1, ..., 1 - T. Where a
    key lies in the padding, more than `left` frames before the query or `right` after it, there is
    half of the most negative number.
    """
    T = scores.shape[-1]
    frame = torch.arange(T, device=scores.device)
    distance = frame[:, None] - frame  # (T, T), of query and key
    added = _wide(scores) + constant[:, T - distance][:, None]
    allowed = valid_mask(lengths, T)[:, None, None] & (distance <= left) & (-distance <= right)
    return added.to(scores.dtype).transpose(0, 1).where(allowed, torch.finfo(scores.dtype).min / 2)


def first_convs(
    features: Tensor, lengths: Tensor, frames: int, first: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """A 3 x 3 convolution of features (B, T, F) to C channels, mask, ReLU, a 3 x 3 depthwise one:
    (B, frames, F'', C).

    Both have stride 2. Rows 0 to 8 of `first` (16, C) are the weights of the first, row 9 its bias,
    the rest is zero. Weight (9, C) and bias (C,) are those of the second, in float32.
    """
    B, T, bins = features.shape
    more = max(4 * frames - T, 0)
    valid = valid_mask(lengths, T + more)[..., None]
    x = (
        F.pad(features, (0, 0, 0, more)).masked_fill(~valid, 0.0)[:, None].to(first.dtype)
    )  # (B, 1, 4 frames or more, F)
    kernel = first[:9].T.unflatten(1, (1, 3, 3))
    shift = first[9]
    x = F.conv2d(_wide(x), _wide(kernel), _wide(shift), stride=2, padding=1).permute(
        0, 2, 3, 1
    )  # (B, T', F', C)
    return masked_conv(
        x, torch.div(lengths + 1, 2, rounding_mode="floor"), frames, weight, bias
    ).to(first.dtype)


def masked_conv(x: Tensor, lengths: Tensor, frames: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Mask, ReLU and a 3 x 3 depthwise convolution of stride 2: (B, frames, F', C) from (B, T, F,
    C).
    """
    padding = ~valid_mask(lengths, x.shape[1])[:, :, None, None]
    image = x.to(weight.dtype).masked_fill(padding, 0.0).relu().permute(0, 3, 1, 2)
    kernel = weight.T.unflatten(1, (1, 3, 3))
    out = F.conv2d(image, kernel, bias, stride=2, padding=1, groups=len(kernel))
    return out.permute(0, 2, 3, 1)[:, :frames].to(x.dtype).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)
