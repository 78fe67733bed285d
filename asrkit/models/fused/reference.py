"""What the fused kernels compute, in plain torch: to be read, and to test the kernels against.

Inside, every function computes in the dtype of its float32 (or float64) arguments and rounds once,
when it returns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from asrkit.models.attention import lowest
from asrkit.models.encoders import halve
from asrkit.shapes import valid_mask


def add_norm(
    x: Tensor,
    y: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """x + scale * y, and the layer norm of that.

    Args:
        x: Rows (..., D).
        y: Rows (..., D) to be added.
        scale: What `y` is multiplied by.
        weight: Weight (D,) of the norm.
        bias: Bias (D,) of the norm.
        eps: Epsilon of the norm.
    """
    total = _sum(x, y, scale)
    normed = _layer_norm(total, weight, bias, eps)
    return total.to(x.dtype), normed.to(x.dtype)


def add_norm_twice(  # noqa: PLR0913 - the sibling of a kernel
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
    """The layer norm of x + scale * y, which ends a block, and the layer norm of that.

    Args:
        x: Rows (..., D).
        y: Rows (..., D) to be added.
        scale: What `y` is multiplied by.
        weight: Weight (D,) of the first norm.
        bias: Bias (D,) of the first norm.
        eps: Epsilon of the first norm.
        next_weight: Weight (D,) of the next block's first norm.
        next_bias: Its bias (D,).
        next_eps: Its epsilon.
    """
    total = _sum(x, y, scale)
    first = _layer_norm(total, weight, bias, eps)
    second = _layer_norm(first, next_weight, next_bias, next_eps)
    return first.to(x.dtype), second.to(x.dtype)


def gated_conv(gate: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A block's convolution: GLU, mask, depthwise convolution over time, SiLU; (B, T, D).

    Args:
        gate: What the GLU takes (B, T, 2D).
        lengths: Frames of each utterance (B,).
        weight: Weight (K, D) of the convolution with the batch norm folded in, float32.
        bias: Its bias (D,), float32.
    """
    K, D = weight.shape
    T = gate.shape[1]
    x = F.glu(gate.to(weight.dtype), -1)
    valid = valid_mask(lengths, T)
    x = x.masked_fill(~valid[..., None], 0.0)
    channels_first = x.transpose(1, 2)  # (B, D, T)
    kernel = weight.T[:, None]  # (D, 1, K)
    x = F.conv1d(channels_first, kernel, bias, padding=K // 2, groups=D)
    x = F.silu(x).transpose(1, 2)
    return x.to(gate.dtype).contiguous()


def position_bias(
    scores: Tensor,
    constant: Tensor,
    lengths: Tensor,
    left: int,
    right: int,
) -> Tensor:
    """The bias of attention (B, H, T, T): scores by position, the constant, and the mask.

    Args:
        scores: Products of queries with positions, by key (H, B, T, T).
        constant: What every frame of a head adds at a distance of T, T - 1, ..., 1 - T: (H, 2T).
        lengths: Frames of each utterance (B,). A key behind them gets half the lowest number.
        left: Frames that a frame attends to before it; keys beyond get the same.
        right: Frames that it attends to behind it.
    """
    T = scores.shape[-1]
    frames = torch.arange(T, device=scores.device)
    distance = frames[:, None] - frames  # (T, T), of query and key
    constant_by_key = constant[:, T - distance]  # (H, T, T)
    bias = _at_least_float32(scores) + constant_by_key[:, None]
    by_utterance = bias.to(scores.dtype).transpose(0, 1)  # (B, H, T, T)
    near = (distance <= left) & (-distance <= right)
    valid = valid_mask(lengths, T)
    allowed = valid[:, None, None] & near  # (B, 1, T, T)
    return by_utterance.where(allowed, lowest(scores.dtype))


def first_convs(
    features: Tensor,
    lengths: Tensor,
    frames: int,
    first: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """A 3 x 3 convolution to C channels, mask, ReLU, a 3 x 3 depthwise one: (B, frames, F'', C).

    Both have stride 2.

    Args:
        features: Features (B, T, F).
        lengths: Frames of each utterance (B,).
        frames: Frames of the result.
        first: The first convolution (16, C): nine rows of weights, one of biases, zeros.
        weight: Weight (9, C) of the second, float32.
        bias: Bias (C,) of the second, float32.
    """
    T = features.shape[1]
    more = max(4 * frames - T, 0)
    valid = valid_mask(lengths, T + more)
    x = F.pad(features, (0, 0, 0, more))
    x = x.masked_fill(~valid[..., None], 0.0)
    image = x[:, None].to(first.dtype)  # (B, 1, 4 frames or more, F)
    image = _at_least_float32(image)
    kernel = first[:9].T.unflatten(1, (1, 3, 3))  # (C, 1, 3, 3)
    kernel = _at_least_float32(kernel)
    shift = _at_least_float32(first[9])
    out = F.conv2d(image, kernel, shift, stride=2, padding=1)  # (B, C, T', F')
    channels_last = out.permute(0, 2, 3, 1)
    out = masked_conv(channels_last, halve(lengths), frames, weight, bias)
    return out.to(first.dtype)


def masked_conv(
    x: Tensor,
    lengths: Tensor,
    frames: int,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Mask, ReLU and a 3 x 3 depthwise convolution of stride 2: (B, frames, F', C).

    Args:
        x: (B, T, F, C).
        lengths: Frames of each utterance (B,).
        frames: Frames of the result.
        weight: Weight (9, C), float32.
        bias: Bias (C,), float32.
    """
    T = x.shape[1]
    valid = valid_mask(lengths, T)
    padding = ~valid[:, :, None, None]
    masked = x.to(weight.dtype).masked_fill(padding, 0.0)
    image = masked.relu().permute(0, 3, 1, 2)  # (B, C, T, F)
    kernel = weight.T.unflatten(1, (1, 3, 3))  # (C, 1, 3, 3)
    out = F.conv2d(image, kernel, bias, stride=2, padding=1, groups=len(kernel))
    out = out.permute(0, 2, 3, 1)  # (B, T', F', C)
    out = out[:, :frames]
    return out.to(x.dtype).contiguous()


def _sum(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x + scale * y, in float32 at least."""
    x = _at_least_float32(x)
    y = _at_least_float32(y)
    return x + scale * y


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    width = x.shape[-1:]
    weight = weight.to(x.dtype)
    bias = bias.to(x.dtype)
    return F.layer_norm(x, width, weight, bias, eps)


def _at_least_float32(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype)
