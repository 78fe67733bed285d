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

from asrkit.models.fused.float8 import LARGEST, TINY
from asrkit.runtime import tf32_asked

CHUNK = 32  # frames that a program of `gated_conv` walks; it reads K - 1 more around them


def add_norm(
    x: Tensor, y: Tensor, scale: float, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.add_norm`."""
    return _norms(x, y, scale, (weight, bias, eps), (weight, bias, eps), twice=False)


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
    """See `reference.add_norm_twice`."""
    return _norms(x, y, scale, (weight, bias, eps), (next_weight, next_bias, next_eps), twice=True)


def _norms(
    x: Tensor, y: Tensor, scale: float, first: tuple, second: tuple, *, twice: bool
) -> tuple[Tensor, Tensor]:
    x, y, D = x.contiguous(), y.contiguous(), x.shape[-1]
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    _add_norm[(x.numel() // D,)](
        x, y, total, normed, scale, *first, *second, D, twice, triton.next_power_of_2(D)
    )
    return total, normed


def gated_conv(gate: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `reference.gated_conv`."""
    gate = gate.contiguous()
    (B, T, _), (K, D) = gate.shape, weight.shape
    out = gate.new_empty(B, T, D)
    BLOCK = min(256, triton.next_power_of_2(D))
    grid = triton.cdiv(T, CHUNK), triton.cdiv(D, BLOCK), B
    _gated_conv[grid](gate, lengths, weight, bias, out, T, D, K, CHUNK, BLOCK, num_warps=2)
    return out


def position_bias(
    scores: Tensor, constant: Tensor, lengths: Tensor, left: int, right: int
) -> Tensor:
    """See `reference.position_bias`."""
    H, B, T, _ = scores.shape
    out = scores.new_empty(B, H, T, T)
    ROWS = 16
    COLUMNS = min(128, max(16, triton.next_power_of_2(T)))
    grid = triton.cdiv(T, ROWS) * triton.cdiv(T, COLUMNS), H, B
    never = torch.finfo(scores.dtype).min / 2
    _position_bias[grid](
        scores, constant, lengths, out, *scores.stride()[:3], T, left, right, never, ROWS, COLUMNS
    )
    return out


def first_convs(
    features: Tensor, lengths: Tensor, frames: int, first: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """See `reference.first_convs`."""
    features = features.contiguous()
    C = len(bias)
    B, T, bins = features.shape
    out = torch.empty(B, frames, (bins + 3) // 4, C, dtype=first.dtype, device=features.device)
    ROWS = 64
    BLOCK = min(128, max(16, triton.next_power_of_2(C)))
    grid = triton.cdiv(frames * out.shape[2], ROWS), triton.cdiv(C, BLOCK), B
    exact = not tf32_asked()
    sizes = T, bins, frames, out.shape[2], C
    _first_convs[grid](
        features, lengths, first, weight, bias, out, *sizes, exact, ROWS, BLOCK, num_warps=8
    )
    return out


def masked_conv(x: Tensor, lengths: Tensor, frames: int, weight: Tensor, bias: Tensor) -> Tensor:
    """See `reference.masked_conv`."""
    x = x.contiguous()
    B, T, bins, C = x.shape
    out = x.new_empty(B, frames, (bins + 1) // 2, C)
    ROWS = 8
    BLOCK = min(256, triton.next_power_of_2(C))
    grid = triton.cdiv(frames * out.shape[2], ROWS), triton.cdiv(C, BLOCK), B
    _masked_conv[grid](x, lengths, weight, bias, out, T, bins, frames, out.shape[2], C, ROWS, BLOCK)
    return out


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `float8.quantize`."""
    return _quantized(x, silu=False)


def silu_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `float8.silu_quantize`."""
    return _quantized(x, silu=True)


def _quantized(x: Tensor, *, silu: bool) -> tuple[Tensor, Tensor]:
    x, D = x.contiguous(), x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    _quantize[(scales.numel(),)](x, out, scales, LARGEST, TINY, D, silu, triton.next_power_of_2(D))
    return out, scales


@triton.jit
def _layer_norm(x, d, here, weight, bias, eps, D):
    mean = tl.sum(tl.where(here, x, 0.0), axis=0) / D
    off = tl.where(here, x - mean, 0.0)
    y = off * tl.rsqrt(tl.sum(off * off, axis=0) / D + eps)
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
    tl.store(
        normed + place, _layer_norm(row, d, here, next_weight, next_bias, next_eps, D), mask=here
    )


@triton.jit
def _gated_conv(
    gate, lengths, taps, shift, out, T, D, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
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
    weights = ()
    window = ()
    for k in tl.static_range(K):
        tap = tl.load(taps + k * D + d, mask=here, other=0.0).to(tl.float32)
        weights = weights + (tap,)  # type: ignore[assignment]  # noqa: RUF005
        window = window + (tl.zeros((BLOCK,), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for step in range(CHUNK + K - 1):
        t = first + step - K // 2
        inside = here & (t >= 0) & (t < length) & (t < T)
        place = gate + (b * T + t) * 2 * D + d
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        opened = tl.sigmoid(tl.load(place + D, mask=inside, other=0.0).to(tl.float32))
        window = window[1:] + (value * opened,)  # type: ignore[assignment]  # noqa: RUF005
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
    score = tl.load(
        scores + h * by_head + b * by_utterance + t * by_row + s, mask=here, other=0.0
    ).to(tl.float32)
    score += tl.load(constant + h * 2 * T + T - t + s, mask=here, other=0.0)
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
    total = tl.zeros((ROWS, BLOCK), tl.float32) + tl.load(shift + c, mask=here, other=0.0)[None, :]
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
        total += tl.maximum(made, 0.0) * tl.load(taps + tap * C + c, mask=here, other=0.0)[None, :]
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
    total = tl.zeros((ROWS, BLOCK), tl.float32) + tl.load(shift + c, mask=here, other=0.0)[None, :]
    for tap in range(9):
        from_t = 2 * t + tap // 3 - 1
        from_f = 2 * f + tap % 3 - 1
        inside = (from_t >= 0) & (from_t < length) & (from_t < T) & (from_f >= 0) & (from_f < bins)
        place = x + ((b * T + from_t) * bins + from_f)[:, None] * C + c
        read = tl.load(place, mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
        total += tl.maximum(read, 0.0) * tl.load(taps + tap * C + c, mask=here, other=0.0)[None, :]
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
