"""A turn of label looping in four kernels and the model's own: what `Loop.plain_turn` needs some
sixty for.

Written for a GPU and so far run in Triton's interpreter only (TRITON_INTERPRET=1 before Python
starts), where it finds what the plain turn finds; and compiled for GPUs that were not there.
Nothing is known of its speed.

Each kernel is an op of torch, so whoever counts or checks ops sees it, on fake tensors too.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.decoders.nests import leaves, nest_map
from asrkit.decoders.transducer.reading import Options, Reader, vocabulary
from asrkit.decoders.transducer.windowed_looping import Place
from asrkit.shapes import expect

LANES = 128  # utterances that `_walk` leads side by side, one a thread
MOST = 2048  # logits or numbers that a program holds at once


class Buffers(Protocol):
    """What a turn reads and writes: asrkit.decoders.transducer.graphs.Loop."""

    options: Options
    encoded: Tensor
    lengths: Tensor
    place: Place
    count: Tensor
    said: Tensor
    sure: Tensor | None
    active: Tensor


def turn(loop: Buffers, read: Reader) -> None:
    """At most one label more for each utterance, written into the loop's buffers, which lie on the
    current device.
    """
    place, T = loop.place, loop.encoded.shape[1]
    frames = WINDOW(loop.encoded, place.time, min(loop.options.window, T))  # (B, W, E)
    logits = read.model.join(frames, place.predicted[:, None])
    V = vocabulary(logits, frames, read.blank, read.durations)
    reading = BEST(logits.contiguous(), read.table, V, read.blank, read.confidence)
    labels, emitted = WALK(
        *reading,
        loop.lengths,
        place.time,
        place.symbols,
        place.scores,
        loop.count,
        loop.said,
        loop.sure,
        loop.active,
        read.blank,
        loop.options.max_symbols,
    )
    keep_said(emitted, read.model.predict(labels, place.state), (place.predicted, place.state))


def keep_said(emitted: Tensor, new: Any, own: Any) -> None:
    """`new` in the place of `own`, two nests alike, for the utterances where `emitted` (B,) is
    true.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    nest_map(lambda ours, theirs: pairs.append((ours, theirs)) or ours, own, new)  # type: ignore[func-returns-value]
    places = {part.untyped_storage()._cdata for part in leaves(own)}
    for ours, theirs in pairs:
        expect(
            theirs.shape == ours.shape,
            "model.predict",
            f"shape {tuple(ours.shape)}, as before",
            tuple(theirs.shape),
        )
        fits = torch.promote_types(ours.dtype, theirs.dtype) == ours.dtype
        expect(
            fits,
            "model.predict",
            f"{ours.dtype}, as it began with",
            theirs.dtype,
            "Keep one dtype.",
        )
    ready = [(ours, _rows_of(theirs, places)) for ours, theirs in pairs if ours.numel()]
    OVERWRITE(emitted, [ours for ours, _ in ready], [theirs for _, theirs in ready])


def _rows_of(part: Tensor, places: set[int]) -> Tensor:
    """`part` with dense rows, and in memory of its own: programs of one launch run in any order."""
    if part.untyped_storage()._cdata in places:
        return part.clone(memory_format=torch.contiguous_format)
    return part if part[0].is_contiguous() else part.contiguous()


def window(encoded: Tensor, time: Tensor, W: int) -> Tensor:
    """The W frames (B, W, E) of encoded (B, T, E) from time (B,) on; the last one again where there
    are no more.
    """
    B, T, E = encoded.shape
    out = encoded.new_empty(B, W, E)
    _window[(B, W)](encoded, time, out, T, E, W, _block(E))
    return out


def best(
    logits: Tensor, table: Tensor | None, V: int, blank: int, confidence: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`Reader`'s token, jump, score and confidence, (B, W) each, of logits (B, W, V + durations)."""
    B, W, size = logits.shape
    token, jump, score, sure = _like_reading(logits, table, V, blank, confidence)
    wide = tl.float64 if logits.dtype == torch.float64 else tl.float32
    _best[(B * W,)](
        logits,
        logits if table is None else table,
        token,
        jump,
        score,
        sure,
        blank,
        math.log(V),
        V,
        size - V,
        confidence == "max_prob",
        confidence == "entropy",
        _block(V),
        _block(size - V),
        wide,
    )
    return token, jump, score, sure


def walk(
    token: Tensor,
    jump: Tensor,
    score: Tensor,
    sure: Tensor,
    lengths: Tensor,
    time: Tensor,
    symbols: Tensor,
    scores: Tensor,
    count: Tensor,
    said: Tensor,
    said_sure: Tensor | None,
    active: Tensor,
    blank: int,
    max_symbols: int,
) -> tuple[Tensor, Tensor]:
    """Over the blanks of the window to the next label; what it is goes into the buffers. The labels
    (B,), and who emitted one.

    said (3, B, columns): labels, frames, durations; active (): whether anybody has frames left.
    """
    B, W = token.shape
    labels, emitted = _like_labels(token)
    _walk[(1,)](
        token,
        jump,
        score,
        sure,
        lengths,
        time,
        symbols,
        scores,
        count,
        said,
        sure if said_sure is None else said_sure,
        active,
        labels,
        emitted,
        blank,
        max_symbols,
        said.shape[2],
        B,
        W,
        said_sure is not None,
        LANES,
    )
    return labels, emitted


def overwrite(emitted: Tensor, own: list[Tensor], new: list[Tensor]) -> None:
    """Rows of `new` in the place of those of `own`, where `emitted` (B,) is true."""
    sizes = tuple(part[0].numel() for part in own)
    strides, block = tuple(part.stride(0) for part in new), _block(max(sizes))
    grid = len(emitted), triton.cdiv(max(sizes), block)
    _overwrite[grid](emitted, tuple(own), tuple(new), strides, sizes, block)


def _like_window(encoded: Tensor, time: Tensor, W: int) -> Tensor:
    return encoded.new_empty(len(encoded), W, encoded.shape[2])


def _like_reading(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole, part = (
        [logits.new_empty(logits.shape[:2], dtype=dtype) for _ in "ab"]
        for dtype in (torch.int64, torch.float32)
    )
    return whole[0], whole[1], part[0], part[1]


def _like_labels(token: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return token.new_empty(len(token)), token.new_empty(len(token), dtype=torch.bool)


def _block(size: int) -> int:
    """Numbers that a program takes at once, of `size` in a row."""
    return min(MOST, triton.next_power_of_2(max(size, 1)))


LIBRARY = torch.library.Library("asrkit", "FRAGMENT")


def _op(
    function: Callable[..., Any], like: Callable[..., Any], *mutates: str
) -> Callable[..., Any]:
    """`function`, which starts one kernel, as an op of torch; `like` makes what it returns, with
    nothing in it.
    """
    name = function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    for kind in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, kind)
    torch.library.register_fake(f"asrkit::{name}", like, lib=LIBRARY)
    return getattr(torch.ops.asrkit, name)


# What a turn calls: the functions above on a device, nothing but shapes on fakes of one.
WINDOW = _op(window, _like_window)
BEST = _op(best, _like_reading)
WALK = _op(walk, _like_labels, "time", "symbols", "scores", "count", "said", "said_sure", "active")
OVERWRITE = _op(overwrite, lambda *_: None, "own")


@triton.jit
def _window(encoded, time, out, T, E: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    b, w = tl.program_id(0).to(tl.int64), tl.program_id(1)
    frame = tl.minimum(tl.load(time + b) + w, T - 1)
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        values = tl.load(encoded + (b * T + frame) * E + e, mask=e < E)
        tl.store(out + (b * W + w) * E + e, values, mask=e < E)


@triton.jit
def _softmax(row, N: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The first of the largest of N logits, its log-probability, and the entropy in nats. With a
    NaN: 0, NaN and NaN.
    """
    largest = tl.full((), -float("inf"), WIDE)
    token = tl.full((), 0, tl.int32)
    for first in range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < N, other=-float("inf")).to(WIDE)
        here, which = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(here > largest, first + which, token)
        largest = tl.maximum(here, largest)
    total = tl.full((), 0.0, WIDE)
    spread = tl.full((), 0.0, WIDE)  # sum of e ** x times x, of logits x less the largest
    for first in range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < N, other=-float("inf")).to(WIDE) - largest
        share = tl.exp(x)
        total += tl.sum(share, axis=0)
        spread += tl.sum(tl.where(share > 0, share * x, 0.0), axis=0)
    z = tl.log(total)
    return tl.where(z == z, token, 0), -z, z - spread / total


@triton.jit
def _best(
    logits,
    table,
    token,
    jump,
    score,
    sure,
    blank,
    log_V,
    V: tl.constexpr,
    DURATIONS: tl.constexpr,
    MAX_PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * (V + DURATIONS)
    word, logp, entropy = _softmax(here, V, BLOCK, WIDE)
    if MAX_PROB:
        tl.store(sure + row, tl.exp(logp))
    if ENTROPY:
        certainty = 1 - entropy / log_V
        certainty = tl.where(certainty < 0, 0.0, certainty)  # NaN passes
        tl.store(sure + row, tl.where(certainty > 1, 1.0, certainty))
    move = (word == blank).to(tl.int64)
    if DURATIONS > 0:
        which, its, _ = _softmax(here + V, DURATIONS, BLOCK_D, WIDE)
        move = tl.maximum(tl.load(table + which), move)
        logp += its
    tl.store(token + row, word)
    tl.store(jump + row, move)
    tl.store(score + row, logp)


@triton.jit
def _walk(
    token,
    jump,
    score,
    sure,
    lengths,
    time,
    symbols,
    scores,
    count,
    said,
    said_sure,
    active,
    labels,
    emitted,
    blank,
    max_symbols,
    columns,
    B: tl.constexpr,
    W: tl.constexpr,
    SURE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program leads all utterances, so that it can tell whether anybody has frames left."""
    left = tl.zeros((LANES,), tl.int32)
    for first in range(0, B, LANES):
        b = (first + tl.arange(0, LANES)).to(tl.int64)
        here = b < B
        length, start = (
            tl.load(lengths + b, mask=here, other=0),
            tl.load(time + b, mask=here, other=0),
        )
        total, at = tl.load(scores + b, mask=here, other=0.0), tl.zeros((LANES,), tl.int64)
        for _ in range(
            W
        ):  # over blanks, one a round at least, until a label, the window's end or the utterance's
            inside = (at < W) & (start + at < length)
            silent = inside & (tl.load(token + b * W + at, mask=inside, other=0) == blank)
            total += tl.load(score + b * W + at, mask=silent, other=0.0)
            at += tl.load(jump + b * W + at, mask=silent, other=0)
        found, last = start + at, b * W + tl.minimum(at, W - 1)
        says = (at < W) & (found < length)
        word, duration = (
            tl.load(token + last, mask=here, other=0),
            tl.load(jump + last, mask=says, other=0),
        )
        here_so_far = tl.where(at == 0, tl.load(symbols + b, mask=here, other=0), 0) + says.to(
            tl.int64
        )
        full = (
            says & (duration == 0) & (here_so_far >= max_symbols)
        )  # this frame has said enough: on, without a blank
        now, column = found + duration + full.to(tl.int64), tl.load(count + b, mask=here, other=0)
        row, each = said + b * columns + column, columns.to(tl.int64) * B
        tl.store(row, word, mask=says)
        tl.store(row + each, found, mask=says)
        tl.store(row + 2 * each, duration, mask=says)
        if SURE:
            tl.store(said_sure + b * columns + column, tl.load(sure + last, mask=says), mask=says)
        tl.store(time + b, now, mask=here)
        tl.store(symbols + b, tl.where(now == found, here_so_far, 0), mask=here)
        tl.store(scores + b, total + tl.load(score + last, mask=says, other=0.0), mask=here)
        tl.store(count + b, column + says.to(tl.int64), mask=here)
        tl.store(labels + b, word, mask=here)
        tl.store(emitted + b, says, mask=here)
        left |= (here & (now < length)).to(tl.int32)
    tl.store(active, tl.max(left, axis=0) > 0)


@triton.jit
def _overwrite(emitted, own, new, strides, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    b, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    moves = tl.load(emitted + b)
    for part in tl.static_range(len(SIZES)):
        mask = (at < SIZES[part]) & moves
        values = tl.load(new[part] + b * strides[part] + at, mask=mask)
        tl.store(own[part] + b * SIZES[part] + at, values, mask=mask)
