"""The fused steps of an encoder as Triton kernels.

`asrkit.models.fused.reference` has a function of the same name, arguments and shapes for each, in
plain torch. The kernels are written for a GPU and so far were only compiled for it and run in
Triton's interpreter (TRITON_INTERPRET=1 before Python starts), which shows what they compute and
nothing about their speed. All add up in float32, whatever they read and write.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.models.attention import lowest
from asrkit.models.fused.float8 import LARGEST, TINY
from asrkit.runtime import tf32_asked

CHUNK = 32  # frames that a program of `gated_conv` walks; it reads K - 1 more around them


def add_norm(
    x: Tensor,
    y: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """x + scale * y, and the layer norm of that, both (..., D); as `reference.add_norm`.

    Args:
        x: Rows (..., D).
        y: Rows (..., D) to be added.
        scale: What `y` is multiplied by.
        weight: Weight (D,) of the norm.
        bias: Bias (D,) of the norm.
        eps: Epsilon of the norm.
    """
    norm = (weight, bias, eps)
    return _norms(x, y, scale, norm, norm, twice=False)


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
    """The layer norm of x + scale * y, and the next norm of that, both (..., D).

    As `reference.add_norm_twice`.

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
    first = (weight, bias, eps)
    second = (next_weight, next_bias, next_eps)
    return _norms(x, y, scale, first, second, twice=True)


def _norms(
    x: Tensor,
    y: Tensor,
    scale: float,
    first: tuple,
    second: tuple,
    *,
    twice: bool,
) -> tuple[Tensor, Tensor]:
    """The sum, its `first` norm if `twice`, and the `second` norm of that: both (..., D)."""
    x = x.contiguous()
    y = y.contiguous()
    D = x.shape[-1]
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    rows = x.numel() // D
    BLOCK = triton.next_power_of_2(D)
    _add_norm[(rows,)](x, y, total, normed, scale, *first, *second, D, twice, BLOCK)
    return total, normed


def gated_conv(gate: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GLU, mask, depthwise convolution over time, SiLU: (B, T, D); as `reference.gated_conv`.

    Args:
        gate: What the GLU takes (B, T, 2D).
        lengths: Frames of each utterance (B,).
        weight: Weight (K, D) of the convolution, float32.
        bias: Its bias (D,), float32.
    """
    gate = gate.contiguous()
    B, T, _ = gate.shape
    K, D = weight.shape
    out = gate.new_empty(B, T, D)
    BLOCK = min(256, triton.next_power_of_2(D))
    chunks = triton.cdiv(T, CHUNK)
    grid = (chunks, triton.cdiv(D, BLOCK), B)
    _gated_conv[grid](gate, lengths, weight, bias, out, T, D, K, CHUNK, BLOCK, num_warps=2)
    return out


def position_bias(
    scores: Tensor,
    constant: Tensor,
    lengths: Tensor,
    left: int,
    right: int,
) -> Tensor:
    """The bias of attention (B, H, T, T); as `reference.position_bias`.

    Args:
        scores: Products of queries with positions, by key (H, B, T, T); read by its strides.
        constant: What every frame of a head adds at each distance (H, 2T), float32.
        lengths: Frames of each utterance (B,).
        left: Frames that a frame attends to before it.
        right: Frames that it attends to behind it.
    """
    H, B, T, _ = scores.shape
    out = scores.new_empty(B, H, T, T)
    ROWS = 16
    COLUMNS = min(128, max(16, triton.next_power_of_2(T)))
    tiles = triton.cdiv(T, ROWS) * triton.cdiv(T, COLUMNS)
    strides = scores.stride()[:3]
    never = lowest(scores.dtype)
    _position_bias[(tiles, H, B)](
        scores, constant, lengths, out, *strides, T, left, right, never, ROWS, COLUMNS
    )
    return out


def first_convs(
    features: Tensor,
    lengths: Tensor,
    frames: int,
    first: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """The first two convolutions (B, frames, F'', C); as `reference.first_convs`.

    Args:
        features: Features (B, T, F).
        lengths: Frames of each utterance (B,).
        frames: Frames of the result.
        first: The first convolution (16, C): nine rows of weights, one of biases, zeros.
        weight: Weight (9, C) of the second, float32.
        bias: Bias (C,) of the second, float32.
    """
    features = features.contiguous()
    C = len(bias)
    B, T, bins = features.shape
    out_bins = (bins + 3) // 4
    out = torch.empty(B, frames, out_bins, C, dtype=first.dtype, device=features.device)
    ROWS = 64
    BLOCK = min(128, max(16, triton.next_power_of_2(C)))
    grid = (triton.cdiv(frames * out_bins, ROWS), triton.cdiv(C, BLOCK), B)
    exact = not tf32_asked()
    sizes = (T, bins, frames, out_bins, C)
    _first_convs[grid](
        features, lengths, first, weight, bias, out, *sizes, exact, ROWS, BLOCK, num_warps=8
    )
    return out


def masked_conv(
    x: Tensor,
    lengths: Tensor,
    frames: int,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Mask, ReLU and a depthwise convolution (B, frames, F', C); as `reference.masked_conv`.

    Args:
        x: (B, T, F, C).
        lengths: Frames of each utterance (B,).
        frames: Frames of the result.
        weight: Weight (9, C), float32.
        bias: Bias (C,), float32.
    """
    x = x.contiguous()
    B, T, bins, C = x.shape
    out_bins = (bins + 1) // 2
    out = x.new_empty(B, frames, out_bins, C)
    ROWS = 8
    BLOCK = min(256, triton.next_power_of_2(C))
    grid = (triton.cdiv(frames * out_bins, ROWS), triton.cdiv(C, BLOCK), B)
    sizes = (T, bins, frames, out_bins, C)
    _masked_conv[grid](x, lengths, weight, bias, out, *sizes, ROWS, BLOCK)
    return out


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `float8.quantize`."""
    return _quantized(x, silu=False)


def silu_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `float8.silu_quantize`."""
    return _quantized(x, silu=True)


def _quantized(x: Tensor, *, silu: bool) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    *leading, D = x.shape
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*leading, 1, dtype=torch.float32, device=x.device)
    rows = scales.numel()
    BLOCK = triton.next_power_of_2(D)
    _quantize[(rows,)](x, out, scales, LARGEST, TINY, D, silu, BLOCK)
    return out, scales


@triton.jit
def _layer_norm(x, d, here, weight, bias, eps, D):
    mean = tl.sum(tl.where(here, x, 0.0), axis=0) / D
    off = tl.where(here, x - mean, 0.0)
    variance = tl.sum(off * off, axis=0) / D
    y = off * tl.rsqrt(variance + eps)
    w = tl.load(weight + d, mask=here, other=0.0)
    b = tl.load(bias + d, mask=here, other=0.0)
    return y * w.to(tl.float32) + b.to(tl.float32)


@triton.jit
def _add_norm(
    x,
    y,
    total,
    normed,
    scale,
    weight,
    bias,
    eps,
    next_weight,
    next_bias,
    next_eps,
    D,
    TWICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes one row."""
    d = tl.arange(0, BLOCK)
    here = d < D
    place = tl.program_id(0).to(tl.int64) * D + d
    row = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    row += scale * tl.load(y + place, mask=here, other=0.0).to(tl.float32)
    if TWICE:
        row = _layer_norm(row, d, here, weight, bias, eps, D)
    tl.store(total + place, row, mask=here)
    after = _layer_norm(row, d, here, next_weight, next_bias, next_eps, D)
    tl.store(normed + place, after, mask=here)


@triton.jit
def _gated_conv(
    gate,
    lengths,
    taps,
    shift,
    out,
    T,
    D,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program walks CHUNK frames of an utterance with the last K in registers: each is read, and
    its sigmoid taken, once.
    """
    first = tl.program_id(0) * CHUNK
    b = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = d < D
    length = tl.load(lengths + b)
    added = tl.load(shift + d, mask=here, other=0.0).to(tl.float32)
    zeros = tl.zeros((BLOCK,), tl.float32)
    weights = ()
    window = ()
    for k in tl.static_range(K):
        tap = tl.load(taps + k * D + d, mask=here, other=0.0).to(tl.float32)
        weights = weights + (tap,)  # type: ignore[assignment]  # noqa: RUF005
        window = window + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    for step in range(CHUNK + K - 1):
        t = first + step - K // 2
        inside = here & (t >= 0) & (t < length) & (t < T)
        place = gate + (b * T + t) * 2 * D + d
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        gate_of_value = tl.load(place + D, mask=inside, other=0.0).to(tl.float32)
        gated = value * tl.sigmoid(gate_of_value)
        window = window[1:] + (gated,)  # type: ignore[assignment]  # noqa: RUF005
        if step >= K - 1:
            y = added
            for k in tl.static_range(K):
                y += weights[k] * window[k]
            done = t - K // 2
            tl.store(out + (b * T + done) * D + d, y * tl.sigmoid(y), mask=here & (done < T))


@triton.jit
def _position_bias(
    scores,
    constant,
    lengths,
    out,
    by_head,
    by_utterance,
    by_row,
    T,
    left,
    right,
    never,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program takes a tile of queries by keys of one head."""
    tiles = tl.cdiv(T, COLUMNS)
    t = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    s = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    here = (t < T) & (s < T)
    place = scores + h * by_head + b * by_utterance + t * by_row + s
    score = tl.load(place, mask=here, other=0.0).to(tl.float32)
    place = constant + h * 2 * T + T - t + s
    score += tl.load(place, mask=here, other=0.0)
    allowed = (s < tl.load(lengths + b)) & (t - s <= left) & (s - t <= right)
    row = (b * tl.num_programs(1) + h) * T + t
    tl.store(out + row * T + s, tl.where(allowed, score, never), mask=here)


@triton.jit
def _first_convs(
    features,
    lengths,
    first,
    taps,
    shift,
    out,
    T,
    bins,
    frames,
    out_bins,
    C,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program makes ROWS places of BLOCK channels: nine products, one for each tap of the
    depthwise convolution.

    A product's row is a window of nine features and a one, for the bias. Where the place that a tap
    reads is padding the whole row is zero, and with it what the tap adds.
    """
    b = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, 16)
    here = c < C
    length = tl.load(lengths + b)
    kernel = tl.load(first + k[:, None] * C + c, mask=here[None, :], other=0.0)  # (16, BLOCK)
    t = at // out_bins
    f = at % out_bins
    added = tl.load(shift + c, mask=here, other=0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32) + added[None, :]
    for tap in range(9):
        half_t = 2 * t + tap // 3 - 1
        half_f = 2 * f + tap % 3 - 1
        valid = (
            (half_t >= 0)
            & (half_t < (length + 1) // 2)
            & (half_f >= 0)
            & (half_f < (bins + 1) // 2)
        )
        from_t = (2 * half_t - 1)[:, None] + k // 3
        from_f = (2 * half_f - 1)[:, None] + k % 3  # (ROWS, 16)
        inside = (
            valid[:, None]
            & (k < 9)
            & (from_t >= 0)
            & (from_t < length)
            & (from_t < T)
            & (from_f >= 0)
            & (from_f < bins)
        )
        window = tl.load(features + (b * T + from_t) * bins + from_f, mask=inside, other=0.0)
        window = tl.where(valid[:, None] & (k == 9), 1.0, window).to(kernel.dtype)
        made = tl.dot(window, kernel, input_precision="ieee" if EXACT else "tf32")  # (ROWS, BLOCK)
        weight = tl.load(taps + tap * C + c, mask=here, other=0.0)
        total += tl.maximum(made, 0.0) * weight[None, :]
    place = out + (b * frames * out_bins + at[:, None]) * C + c
    tl.store(place, total, mask=(at < frames * out_bins)[:, None] & here[None, :])


@triton.jit
def _masked_conv(
    x,
    lengths,
    taps,
    shift,
    out,
    T,
    bins,
    frames,
    out_bins,
    C,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program makes ROWS places of BLOCK channels."""
    b = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = c < C
    length = tl.load(lengths + b)
    t = at // out_bins
    f = at % out_bins
    added = tl.load(shift + c, mask=here, other=0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32) + added[None, :]
    for tap in range(9):
        from_t = 2 * t + tap // 3 - 1
        from_f = 2 * f + tap % 3 - 1
        inside = (from_t >= 0) & (from_t < length) & (from_t < T) & (from_f >= 0) & (from_f < bins)
        place = x + ((b * T + from_t) * bins + from_f)[:, None] * C + c
        read = tl.load(place, mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
        weight = tl.load(taps + tap * C + c, mask=here, other=0.0)
        total += tl.maximum(read, 0.0) * weight[None, :]
    place = out + (b * frames * out_bins + at[:, None]) * C + c
    tl.store(place, total, mask=(at < frames * out_bins)[:, None] & here[None, :])


@triton.jit
def _quantize(x, out, scales, largest, tiny, D, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    here = d < D
    value = tl.load(x + row * D + d, mask=here, other=0.0).to(tl.float32)
    if SILU:
        value = value * tl.sigmoid(value)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / largest, tiny)
    tl.store(scales + row, scale)
    scaled = tl.minimum(tl.maximum(value / scale, -largest), largest)
    tl.store(out + row * D + d, scaled.to(tl.float8e4nv), mask=here)
