"""Both passes over the logits in Triton.

The log-softmax is fused with the arc log-probabilities, and the softmax with the gradient.

A program of one warp processes one node at a time. It reads the tokens block by block and keeps a
running maximum and a sum of exp relative to it, so that its registers do not grow with V. Floor:
the logits are read twice and the gradient is written once, 3 x 4 B T U1 V bytes in float32, half of
that in half precision. Sums and exp are float32.

Rows of V = 1025 do not start at multiples of 16 bytes, so a lane reads one logit with each load.
Neighbouring lanes still read neighbouring logits, so no extra sectors are fetched. If every row
starts and ends at such a multiple (V = 1024), a lane reads 16 bytes at once, which saves
instructions but no bytes.

On an H100 the passes agree with the reference. On a CPU they run in Triton's interpreter
(TRITON_INTERPRET=1 before Python starts).
"""

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.losses.lattice import (
    FIRST_LOGIT,
    FIRST_NODE,
    FRAME_STEP,
    FRAMES,
    LABEL_STEP,
    LABELS,
    PADDED_FRAMES,
    PADDED_ROWS,
    ArcLogProbs,
    LatticeOptions,
    Nodes,
    Saved,
)

MAX_BLOCK = 1024  # tokens of the largest block: 32 registers of a lane
MIN_BLOCK = 32  # tokens of the smallest block, one for each lane
NODES = 8  # nodes of a program, processed one after another
# Fuse products and sums into one operation; Triton 3.10 no longer does so by default.
FUSED = {"enable_fp_fusion": True}
OPTIONS = {"num_warps": 1, "num_stages": 1, **FUSED}
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(log2(e))

# Columns of the table of nodes, as constants of the kernels.
FRAMES_ = tl.constexpr(FRAMES)
LABELS_ = tl.constexpr(LABELS)
FIRST_NODE_ = tl.constexpr(FIRST_NODE)
FIRST_LOGIT_ = tl.constexpr(FIRST_LOGIT)
FRAME_STEP_ = tl.constexpr(FRAME_STEP)
LABEL_STEP_ = tl.constexpr(LABEL_STEP)
PADDED_FRAMES_ = tl.constexpr(PADDED_FRAMES)
PADDED_ROWS_ = tl.constexpr(PADDED_ROWS)


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Return the arc log-probabilities of all `nodes`, float32, (N,) each."""
    arcs = ArcLogProbs.empty(logits, nodes, len(options.durations))
    write_arc_log_probs(logits, targets, nodes, options, arcs)
    return arcs


def write_arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions, out: ArcLogProbs
) -> None:
    """Write the arc log-probabilities of `nodes` into `out`, which may hold further nodes."""
    with torch.cuda.device_of(logits):
        _scores[_grid(nodes, nodes.sizes)](
            logits,
            targets.contiguous(),
            targets.shape[1],
            nodes.on(logits.device),
            *out,
            options.blank,
            TOGETHER=together(logits, nodes),
            **_constants(logits, options),
        )


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over all of `out`; see `asrkit.losses.wavefront.gradient`."""
    with torch.cuda.device_of(logits):
        _gradient[_grid(nodes, nodes.padded_sizes)](
            logits,
            out,
            targets.contiguous(),
            targets.shape[1],
            nodes.on(logits.device),
            *saved,
            incoming.float().contiguous(),
            options.blank,
            TOGETHER=min(together(logits, nodes), together(out, nodes)),
            **_constants(logits, options),
        )


def _constants(logits: Tensor, options: LatticeOptions) -> dict[str, int]:
    """Return the constants and compiler options of both kernels."""
    n = len(options.durations)
    V = logits.shape[-1] - n
    fused = options.fused_log_softmax
    return {"V": V, "N": n, "FUSED": fused, **blocks(V, n), **OPTIONS}


def blocks(V: int, n: int) -> dict[str, int]:
    """Return the kernels' block sizes for V tokens and n durations.

    BLOCK is the size of a whole block, a power of two of at most V. TAIL is the size of the last
    block, for the remaining tokens, and ROOM that of the durations. For V = 513 the blocks have 512
    and 32 places; a single block would have 1,024, twice as many as there are tokens.
    """
    block = min(MAX_BLOCK, max(MIN_BLOCK, 1 << (V.bit_length() - 1)))
    return {
        "BLOCK": block,
        "TAIL": max(MIN_BLOCK, triton.next_power_of_2(V % block)),
        "ROOM": triton.next_power_of_2(n),
    }


def together(logits: Tensor, nodes: Nodes) -> int:
    """Return how many logits a lane can read at once: 16 bytes if all rows are aligned, else 1."""
    starts = nodes.table[:, FIRST_LOGIT : LABEL_STEP + 1] * logits.element_size()
    aligned = logits.data_ptr() % 16 == 0 and not bool((starts % 16).any())
    if not aligned:
        return 1
    return 16 // logits.element_size()


def _grid(nodes: Nodes, sizes: Tensor) -> tuple[int, int]:
    """Return the grid for utterances of `sizes` (B,) nodes."""
    return triton.cdiv(int(sizes.max()), NODES), len(nodes.table)


@triton.jit
def column(table, b, column: tl.constexpr):
    """Load an entry of a table of nodes, int64 (B, 8)."""
    return tl.load(table + b * 8 + column)


@triton.jit
def lattice_size(table, b):
    """Load the frames T, the lattice rows U1 and the index of the first node of utterance b."""
    T = column(table, b, FRAMES_).to(tl.int32)
    U1 = column(table, b, LABELS_).to(tl.int32) + 1
    return T, U1, column(table, b, FIRST_NODE_)


@triton.jit
def _first_logit(table, b, t, u, TOGETHER: tl.constexpr):
    """Return the index of the first logit of a node."""
    frame = t * column(table, b, FRAME_STEP_)
    label = u * column(table, b, LABEL_STEP_)
    return tl.multiple_of(column(table, b, FIRST_LOGIT_) + frame + label, TOGETHER)


@triton.jit
def _exp(x):
    """exp(x) in two instructions; results below float32's normal range are 0.

    The product is rounded, so the relative error is about 1e-7 |x|. At x = -80 that is about 60
    units in the last place, which is harmless because exp(x) is tiny there.
    """
    return tl.exp2(x * LOG2E)


@triton.jit
def _joined(tokens, largest, total):
    """Update the `largest` value, and the `total` of exp relative to it, with further tokens."""
    updated = tl.maximum(largest, tl.max(tokens, axis=0))
    return updated, total * _exp(largest - updated) + tl.sum(_exp(tokens - updated), axis=0)


@triton.jit
def _log_normaliser(x, V: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """Return the largest of the V logits at `x`, and the log of the sum of exp relative to it.

    The result is NaN if a logit is NaN or inf, or if all are -inf.
    """
    largest = LOWEST
    total = 0.0
    for first in range(0, V // BLOCK * BLOCK, BLOCK):
        tokens = tl.load(x + first + tl.arange(0, BLOCK)).to(tl.float32)
        largest, total = _joined(tokens, largest, total)
    if V % BLOCK > 0:
        v = V // BLOCK * BLOCK + tl.arange(0, TAIL)
        tokens = tl.load(x + v, mask=v < V, other=-float("inf")).to(tl.float32)
        largest, total = _joined(tokens, largest, total)
    return largest, tl.log(total)


@triton.jit
def _scores(
    logits,
    targets,
    U,
    table,
    log_z,
    blank_logp,
    label_logp,
    duration_logp,
    blank,
    V: tl.constexpr,
    N: tl.constexpr,
    FUSED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    ROOM: tl.constexpr,
):
    b = tl.program_id(1)
    T, U1, first = lattice_size(table, b)
    place = tl.program_id(0)
    while place < T * U1:
        u = place % U1
        node = first + place
        x = logits + _first_logit(table, b, place // U1, u, TOGETHER)
        label = tl.load(targets + b * U + u, mask=u + 1 < U1, other=0)
        at_blank = tl.load(x + blank).to(tl.float32)
        at_label = tl.load(x + label).to(tl.float32)
        largest = 0.0
        rest = 0.0
        if FUSED:
            largest, rest = _log_normaliser(x, V, BLOCK, TAIL)
        # subtracting both loses less than subtracting their rounded sum
        tl.store(log_z + node, largest + rest)
        tl.store(blank_logp + node, at_blank - largest - rest)
        tl.store(label_logp + node, tl.where(u + 1 < U1, at_label - largest - rest, -float("inf")))
        if N > 0:
            i = tl.arange(0, ROOM)
            tail = tl.load(x + V + i, mask=i < N, other=-float("inf")).to(tl.float32)
            largest = LOWEST  # Triton 3.8's interpreter does not accept the constant itself below
            largest, total = _joined(tail, largest, 0.0)
            tl.store(duration_logp + node * N + i, tail - largest - tl.log(total), mask=i < N)
        place += tl.num_programs(0)


@triton.jit
def _zeros(out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, SIZE, BLOCK):
        v = first + tl.arange(0, BLOCK)
        tl.store(out + v, tl.zeros((BLOCK,), out.dtype.element_ty), mask=v < SIZE)


@triton.jit
def _softmax(x, out, log_z, factor, V: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """Write factor exp(x - log_z). A block is read before it is written, so `out` may be `x`."""
    for first in range(0, V // BLOCK * BLOCK, BLOCK):
        v = first + tl.arange(0, BLOCK)
        grad = factor * _exp(tl.load(x + v).to(tl.float32) - log_z)
        tl.store(out + v, grad.to(out.dtype.element_ty))
    if V % BLOCK > 0:
        v = V // BLOCK * BLOCK + tl.arange(0, TAIL)
        grad = factor * _exp(tl.load(x + v, mask=v < V, other=0.0).to(tl.float32) - log_z)
        tl.store(out + v, grad.to(out.dtype.element_ty), mask=v < V)


@triton.jit
def _gradient(
    logits,
    out,
    targets,
    U,
    table,
    log_z,
    blank_posterior,
    label_posterior,
    duration_gradient,
    incoming,
    blank,
    V: tl.constexpr,
    N: tl.constexpr,
    FUSED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    ROOM: tl.constexpr,
):
    b = tl.program_id(1)
    T, U1, first = lattice_size(table, b)
    width = column(table, b, PADDED_ROWS_).to(tl.int32)
    scale = tl.load(incoming + b)
    place = tl.program_id(0)
    size = column(table, b, PADDED_FRAMES_).to(tl.int32) * width
    while place < size:
        t = place // width
        u = place % width
        start = _first_logit(table, b, t, u, TOGETHER)
        g = out + start
        if (t >= T) | (u >= U1):
            _zeros(g, V + N, BLOCK)
        else:
            x = logits + start
            node = first + t * U1 + u
            by_blank = tl.load(blank_posterior + node)
            by_label = tl.load(label_posterior + node)
            z = tl.load(log_z + node)
            label = tl.load(targets + b * U + u, mask=u + 1 < U1, other=blank)
            posterior = by_blank + by_label if FUSED else 0.0
            at_blank = -by_blank
            at_label = -by_label
            if posterior != 0.0:
                at_blank += posterior * _exp(tl.load(x + blank).to(tl.float32) - z)
                at_label += posterior * _exp(tl.load(x + label).to(tl.float32) - z)
                tl.debug_barrier()  # both must be read before another lane overwrites them
                _softmax(x, g, z, posterior * scale, V, BLOCK, TAIL)
            else:
                _zeros(g, V, BLOCK)
            if N > 0:
                i = tl.arange(0, ROOM)
                grad = tl.load(duration_gradient + node * N + i, mask=i < N, other=0.0) * scale
                tl.store(g + V + i, grad.to(g.dtype.element_ty), mask=i < N)
            tl.debug_barrier()  # and both written after the other lanes' values
            if u + 1 < U1:
                tl.store(g + label, (at_label * scale).to(g.dtype.element_ty))
            tl.store(g + blank, (at_blank * scale).to(g.dtype.element_ty))
        place += tl.num_programs(0)
