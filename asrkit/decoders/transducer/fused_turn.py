"""The turn of windowed looping in four Triton kernels and the model's own.

`GraphLoop.plain_turn` needs some sixty kernels for the same:

    window     the W frames of every utterance from its clock on        then `join`
    best       the best token of each joint, its jump, score, confidence
    walk       follow blanks to the first label; write it, advance clocks; then `predict`
    overwrite  keep the new predictor state of utterances that emitted

Written for a GPU. So far it was compiled for GPUs and run in Triton's interpreter only
(TRITON_INTERPRET=1 before Python starts), where its results equal those of the plain turn. Its
speed is unknown.

Each kernel is an op of torch, so tools that count or check ops see it, on fake tensors too.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.decoders.states import map_state, state_tensors
from asrkit.decoders.transducer import triton_kernels
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions, vocabulary
from asrkit.decoders.transducer.triton_kernels import LANES
from asrkit.decoders.transducer.windowed_looping import LoopState
from asrkit.shapes import expect

MAX_BLOCK = 2048  # logits or other numbers that one program holds at once


class Buffers(Protocol):
    """What a turn reads and writes: `asrkit.decoders.transducer.graph_loop.GraphLoop`."""

    options: GreedyOptions
    encoded: Tensor
    lengths: Tensor
    state: LoopState
    counts: Tensor
    outputs: Tensor
    confidence: Tensor | None
    active: Tensor


def turn(loop: Buffers, greedy: GreedyModel) -> None:
    """Decode at most one more label of each utterance; writes into the buffers of `loop`.

    Args:
        loop: Its buffers lie on the current device.
        greedy: The model.
    """
    state = loop.state
    W = min(loop.options.window, loop.encoded.shape[1])
    frames = WINDOW(loop.encoded, state.time, W)  # (B, W, E)
    logits = greedy.model.join(frames, state.predicted[:, None])
    V = vocabulary(logits, frames, greedy.blank, greedy.durations)
    tokens = BEST(logits.contiguous(), greedy.duration_table, V, greedy.blank, greedy.confidence)
    labels, emitted = WALK(
        *tokens,
        loop.lengths,
        state.time,
        state.symbols,
        state.scores,
        loop.counts,
        loop.outputs,
        loop.confidence,
        loop.active,
        greedy.blank,
        loop.options.max_symbols,
    )
    after = greedy.model.predict(labels, state.state)
    keep_emitted(emitted, after, (state.predicted, state.state))


def keep_emitted(emitted: Tensor, new: Any, buffers: Any) -> None:
    """Copy `new` into `buffers` for utterances that emitted.

    Args:
        emitted: (B,) bool.
        new: What the predictor returned.
        buffers: A state of the same structure, overwritten in place.

    Raises:
        ValueError: Shapes differ, or a dtype of `new` does not fit into the buffer's.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def collect(buffer: Tensor, after: Tensor) -> Tensor:
        pairs.append((buffer, after))
        return buffer

    map_state(collect, buffers, new)
    storages = {buffer.untyped_storage()._cdata for buffer in state_tensors(buffers)}
    for buffer, after in pairs:
        _check_fits(buffer, after)
    ready = [(buffer, _dense_rows(after, storages)) for buffer, after in pairs if buffer.numel()]
    OVERWRITE(emitted, [buffer for buffer, _ in ready], [after for _, after in ready])


def _check_fits(buffer: Tensor, after: Tensor) -> None:
    wanted = f"shape {tuple(buffer.shape)}, as before"
    expect(after.shape == buffer.shape, "model.predict", wanted, tuple(after.shape))
    expect(
        torch.promote_types(buffer.dtype, after.dtype) == buffer.dtype,
        "model.predict",
        f"{buffer.dtype}, as it began with",
        after.dtype,
        "Keep one dtype.",
    )


def _dense_rows(part: Tensor, storages: set[int]) -> Tensor:
    """`part` with dense rows, in memory of its own: programs of a launch run in any order."""
    if part.untyped_storage()._cdata in storages:
        return part.clone(memory_format=torch.contiguous_format)
    if part[0].is_contiguous():
        return part
    return part.contiguous()


def window(encoded: Tensor, time: Tensor, W: int) -> Tensor:
    """The W frames from each clock on, (B, W, E); the last frame is repeated beyond the end.

    Args:
        encoded: (B, T, E).
        time: (B,) int64.
        W: Frames of a window.
    """
    B, T, E = encoded.shape
    out = encoded.new_empty(B, W, E)
    triton_kernels._window[(B, W)](encoded, time, out, T, E, W, _block(E))
    return out


def best(
    logits: Tensor, table: Tensor | None, V: int, blank: int, confidence: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, jump, score and confidence of `GreedyModel.best_tokens`, (B, W) each.

    Args:
        logits: (B, W, V + durations), contiguous.
        table: Durations of TDT in frames; None for RNN-T.
        V: Vocabulary size, blank included.
        blank: Index of the blank.
        confidence: "none", "max_prob" or "entropy".
    """
    B, W, size = logits.shape
    token, jump, score, token_confidence = _empty_best(logits)
    triton_kernels._best[(B * W,)](
        logits,
        logits if table is None else table,
        token,
        jump,
        score,
        token_confidence,
        blank,
        math.log(V),
        V,
        size - V,
        confidence == "max_prob",
        confidence == "entropy",
        _block(V),
        _block(size - V),
        tl.float64 if logits.dtype == torch.float64 else tl.float32,
    )
    return token, jump, score, token_confidence


def walk(  # noqa: PLR0913 - an op of torch, which takes no records
    token: Tensor,
    jump: Tensor,
    score: Tensor,
    token_confidence: Tensor,
    lengths: Tensor,
    time: Tensor,
    symbols: Tensor,
    scores: Tensor,
    count: Tensor,
    outputs: Tensor,
    output_confidence: Tensor | None,
    active: Tensor,
    blank: int,
    max_symbols: int,
) -> tuple[Tensor, Tensor]:
    """The label and whether there is one, (B,) each; advances the loop's buffers in place.

    Args:
        token: (B, W) best tokens of the window.
        jump: (B, W) frames that each moves on.
        score: (B, W) log-probabilities in nats.
        token_confidence: (B, W) confidence.
        lengths: (B,) valid frames.
        time: (B,) clocks, advanced.
        symbols: (B,) labels on the current frame, advanced.
        scores: (B,) scores of the paths, advanced.
        count: (B,) labels so far, advanced.
        outputs: (3, B, columns) labels, frames and durations, written.
        output_confidence: (B, columns) confidence, written if it is not None.
        active: () bool, set to whether any utterance has frames left.
        blank: Index of the blank.
        max_symbols: Most labels on one frame.
    """
    B, W = token.shape
    labels, emitted = _empty_labels(token)
    triton_kernels._walk[(1,)](
        token,
        jump,
        score,
        token_confidence,
        lengths,
        time,
        symbols,
        scores,
        count,
        outputs,
        token_confidence if output_confidence is None else output_confidence,
        active,
        labels,
        emitted,
        blank,
        max_symbols,
        outputs.shape[2],
        B,
        W,
        output_confidence is not None,
        LANES,
    )
    return labels, emitted


def overwrite(emitted: Tensor, own: list[Tensor], new: list[Tensor]) -> None:
    """Copy rows of `new` over those of `own`, where `emitted` is true.

    Args:
        emitted: (B,) bool.
        own: Contiguous tensors, batch first.
        new: Tensors of the same shapes with dense rows.
    """
    sizes = tuple(part[0].numel() for part in own)
    strides = tuple(part.stride(0) for part in new)
    block = _block(max(sizes))
    grid = len(emitted), triton.cdiv(max(sizes), block)
    triton_kernels._overwrite[grid](emitted, tuple(own), tuple(new), strides, sizes, block)


def _block(size: int) -> int:
    """Numbers that a program takes at once, of `size` in a row."""
    return min(MAX_BLOCK, triton.next_power_of_2(max(size, 1)))


# ---- the functions above as ops of torch, with what they return on fake tensors


def _empty_window(encoded: Tensor, time: Tensor, W: int) -> Tensor:
    return encoded.new_empty(len(encoded), W, encoded.shape[2])


def _empty_best(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = logits.shape[:2]
    token = logits.new_empty(shape, dtype=torch.int64)
    score = logits.new_empty(shape, dtype=torch.float32)
    return token, torch.empty_like(token), score, torch.empty_like(score)


def _empty_labels(token: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return token.new_empty(len(token)), token.new_empty(len(token), dtype=torch.bool)


def _nothing(*_: Any) -> None:
    return None


LIBRARY = torch.library.Library("asrkit", "FRAGMENT")


def _op(
    function: Callable[..., Any], empty_result: Callable[..., Any], *mutates: str
) -> Callable[..., Any]:
    """`function` as an op of torch that changes the arguments `mutates`."""
    name = function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"asrkit::{name}", empty_result, lib=LIBRARY)
    return getattr(torch.ops.asrkit, name)


WINDOW = _op(window, _empty_window)
BEST = _op(best, _empty_best)
WALK = _op(
    walk,
    _empty_labels,
    "time",
    "symbols",
    "scores",
    "count",
    "outputs",
    "output_confidence",
    "active",
)
OVERWRITE = _op(overwrite, _nothing, "own")
