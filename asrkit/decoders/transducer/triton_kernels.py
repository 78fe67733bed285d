"""The Triton kernels of `fused_turn`, which has their arguments."""

import triton
import triton.language as tl

LANES = 128  # utterances that `_walk` leads side by side, one a thread


@triton.jit
def _window(encoded, time, out, T, E: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """One program copies one frame of one window."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1)
    frame = tl.load(time + b) + w
    frame = tl.minimum(frame, T - 1)
    source = encoded + (b * T + frame) * E
    target = out + (b * W + w) * E
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        values = tl.load(source + e, mask=e < E)
        tl.store(target + e, values, mask=e < E)


@triton.jit
def _softmax(row, N: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Index of the largest of N logits (the first of equals), its log-probability, and the entropy
    in nats. With a NaN: 0, NaN and NaN.
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
    weighted = tl.full((), 0.0, WIDE)  # sum of exp(x) x over logits x less the largest
    for first in range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < N, other=-float("inf")).to(WIDE)
        x -= largest
        weight = tl.exp(x)
        product = tl.where(weight > 0, weight * x, 0.0)
        total += tl.sum(weight, axis=0)
        weighted += tl.sum(product, axis=0)
    z = tl.log(total)
    is_number = z == z
    token = tl.where(is_number, token, 0)
    entropy = z - weighted / total
    return token, -z, entropy


@triton.jit
def _best(  # noqa: PLR0913 - kernels take pointers and sizes one by one
    logits,
    table,
    token,
    jump,
    score,
    confidence,
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
    """One program reads the logits of one joint."""
    row = tl.program_id(0).to(tl.int64)
    own_logits = logits + row * (V + DURATIONS)
    label, logp, entropy = _softmax(own_logits, V, BLOCK, WIDE)
    if MAX_PROB:
        tl.store(confidence + row, tl.exp(logp))
    if ENTROPY:
        certainty = 1 - entropy / log_V
        certainty = tl.where(certainty < 0, 0.0, certainty)  # NaN passes
        certainty = tl.where(certainty > 1, 1.0, certainty)
        tl.store(confidence + row, certainty)
    frames = (label == blank).to(tl.int64)
    if DURATIONS > 0:
        index, duration_logp, _ = _softmax(own_logits + V, DURATIONS, BLOCK_D, WIDE)
        duration = tl.load(table + index)
        frames = tl.maximum(duration, frames)
        logp += duration_logp
    tl.store(token + row, label)
    tl.store(jump + row, frames)
    tl.store(score + row, logp)


@triton.jit
def _walk(  # noqa: PLR0913 - as above
    token,
    jump,
    score,
    confidence,
    lengths,
    time,
    symbols,
    scores,
    count,
    outputs,
    output_confidence,
    active,
    labels,
    emitted,
    blank,
    max_symbols,
    columns,
    B: tl.constexpr,
    W: tl.constexpr,
    WITH_CONFIDENCE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program leads all utterances, so that it can tell whether any has frames left."""
    left = tl.zeros((LANES,), tl.int32)
    for first in range(0, B, LANES):
        b = (first + tl.arange(0, LANES)).to(tl.int64)
        real = b < B
        length = tl.load(lengths + b, mask=real, other=0)
        start = tl.load(time + b, mask=real, other=0)
        total = tl.load(scores + b, mask=real, other=0.0)
        # follow blanks, at least one a round, to a label or the end of window or utterance
        window = b * W
        at = tl.zeros((LANES,), tl.int64)
        for _ in range(W):
            inside = (at < W) & (start + at < length)
            here = window + at
            best = tl.load(token + here, mask=inside, other=0)
            skips = inside & (best == blank)
            total += tl.load(score + here, mask=skips, other=0.0)
            at += tl.load(jump + here, mask=skips, other=0)
        frame = start + at
        last = window + tl.minimum(at, W - 1)
        emits = (at < W) & (frame < length)
        label = tl.load(token + last, mask=real, other=0)
        duration = tl.load(jump + last, mask=emits, other=0)
        label_score = tl.load(score + last, mask=emits, other=0.0)
        before = tl.load(symbols + b, mask=real, other=0)
        before = tl.where(at == 0, before, 0)
        on_frame = before + emits.to(tl.int64)
        # a frame with max_symbols labels ends without a blank
        full = emits & (duration == 0) & (on_frame >= max_symbols)
        now = frame + duration + full.to(tl.int64)
        column = tl.load(count + b, mask=real, other=0)
        place = b * columns + column
        plane = columns.to(tl.int64) * B
        output = outputs + place
        tl.store(output, label, mask=emits)
        tl.store(output + plane, frame, mask=emits)
        tl.store(output + 2 * plane, duration, mask=emits)
        if WITH_CONFIDENCE:
            certainty = tl.load(confidence + last, mask=emits)
            tl.store(output_confidence + place, certainty, mask=emits)
        symbols_now = tl.where(now == frame, on_frame, 0)
        tl.store(time + b, now, mask=real)
        tl.store(symbols + b, symbols_now, mask=real)
        tl.store(scores + b, total + label_score, mask=real)
        tl.store(count + b, column + emits.to(tl.int64), mask=real)
        tl.store(labels + b, label, mask=real)
        tl.store(emitted + b, emits, mask=real)
        left |= (real & (now < length)).to(tl.int32)
    tl.store(active, tl.max(left, axis=0) > 0)


@triton.jit
def _overwrite(emitted, own, new, strides, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """One program copies one block of every part of one utterance."""
    b = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    emits = tl.load(emitted + b)
    for part in tl.static_range(len(SIZES)):
        mask = (at < SIZES[part]) & emits
        values = tl.load(new[part] + b * strides[part] + at, mask=mask)
        tl.store(own[part] + b * SIZES[part] + at, values, mask=mask)
