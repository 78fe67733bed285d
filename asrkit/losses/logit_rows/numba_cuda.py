"""Both passes over the logits as CUDA kernels: log-softmax fused with the scores, softmax with the
gradient.

A warp takes a lattice node, its lanes share out the tokens, so neighbours read side by side: EACH
tokens at a time, read before any is used or written, so that as many reads are on their way. Floor:
the logits are read twice and the gradient is written once, 3 x 4 B T U1 V bytes in float32, half of
that in half precision. Sums over tokens and exp are float32 (the relative error of exp(x) is about
1e-7 |x|, harmless where exp is small). Places in the logits are counted in 64 bits without a sign:
Numba asks of a signed index at every element whether it counts from the end. Reads are as wide as a
logit, so it is all one whether a row starts at a multiple of 16 bytes. bfloat16 comes as bit
patterns, since NumPy has none.
"""

from math import copysign, inf, log

import numpy as np
import torch
from numba import cuda, types
from numba.cuda.core import config
from torch import Tensor

from asrkit.losses.gradient import Saved
from asrkit.losses.logit_rows.numba_cpu import flat
from asrkit.losses.nodes import (
    FIRST_LOGIT,
    FIRST_NODE,
    FRAME_STEP,
    FRAMES,
    LABEL_STEP,
    LABELS,
    ROW_FRAMES,
    ROW_NODES,
    ArcLogProbs,
    LatticeOptions,
    Nodes,
)
from asrkit.runtime import SIMULATED

if SIMULATED:
    from math import exp
else:
    from numba.cuda.libdevice import fast_expf as exp  # type: ignore[no-redef]

config.CUDA_LOW_OCCUPANCY_WARNINGS = (
    0  # one block for each lattice is all the work there is, and no mistake
)
LANES, ROWS = (
    32,
    4,
)  # threads that share a node, a power of two, and nodes that a block takes at a time
EACH = 8  # tokens that a lane reads at a time
BLOCKS = 4096  # for each utterance at most; they go on to further nodes in strides
F, AT = np.float32, np.uint64
LOWEST = np.finfo(F).min


def launch(
    kernel, blocks: tuple[int, int], threads: int | tuple[int, int], *arguments, shared: int = 0
) -> None:
    """Queue `kernel` on torch's current stream; a tensor among the arguments (the first is one) is
    seen as it is, uncopied.

    Nobody waits. Memory that torch frees before the kernel has run is given out again on the same
    stream only, hence to work that is queued behind the kernel. In Numba's simulator the tensors
    are the CPU's.
    """
    given = as_bits(arguments)
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        kernel[blocks, threads, 0, shared](
            *(FakeCUDAArray(a.numpy()) if isinstance(a, Tensor) else a for a in given)
        )
        return
    index = given[0].device.index
    with cuda.gpus[index]:
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        arrays = [cuda.as_cuda_array(a, sync=False) if isinstance(a, Tensor) else a for a in given]
        kernel[blocks, threads, stream, shared](*arrays)


def as_bits(arguments: tuple) -> list:
    """The arguments with tensors detached, bfloat16 as bit patterns: uint16."""
    given = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    return [
        a.view(torch.uint16) if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a
        for a in given
    ]


def blocks_for(nodes: Nodes, size: Tensor, each: int = 1) -> tuple[int, int]:
    """Grid for `size` (B,) pieces of work in each utterance, of which a block takes `each` at a
    time.
    """
    return min(-(-int(size.max()) // each), BLOCKS), len(nodes.table)


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Scores of all nodes, (N,) each, float32."""
    n, device = len(options.durations), logits.device
    z, stay, emit = torch.empty((3, nodes.count), device=device).unbind()
    durations = torch.empty((nodes.count, n), device=device)
    blocks = blocks_for(nodes, nodes.table[:, FRAMES] * (nodes.table[:, LABELS] + 1), ROWS)
    launch(
        _scores,
        blocks,
        (LANES, ROWS),
        flat(logits),
        targets.contiguous(),
        nodes.on(device),
        logits.shape[-1] - n,
        options.blank,
        options.fused_log_softmax,
        z,
        stay,
        emit,
        durations,
        shared=8 * LANES * ROWS,
    )
    return ArcLogProbs(z, stay, emit, durations if n else None)


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over all of `out`; see asrkit.losses.gradient.LogitRows."""
    tail = (
        saved.log_z.new_empty((len(saved.log_z), 0))
        if saved.duration_gradient is None
        else saved.duration_gradient
    )
    V, clamp = logits.shape[-1] - tail.shape[1], F(options.clamp if options.clamp > 0 else inf)
    own = nodes if out.stride() == logits.stride() else nodes.of(out)
    tables = nodes.on(logits.device), own.on(logits.device)
    blocks = blocks_for(nodes, nodes.table[:, ROW_FRAMES] * nodes.table[:, ROW_NODES], ROWS)
    given = (
        flat(logits),
        flat(out),
        targets.contiguous(),
        *tables,
        V,
        options.blank,
        options.fused_log_softmax,
        clamp,
    )
    shares = (
        saved.log_z,
        saved.blank_posterior,
        saved.label_posterior,
        tail,
        incoming.float().contiguous(),
    )
    launch(_gradient, blocks, (LANES, ROWS), *given, *shares)


@cuda.jit(device=True)
def _load(x):
    """A logit as float32. The compiler knows the answer of isinstance, so each type has kernels of
    its own.
    """
    return np.uint32(np.uint32(x) << 16).view(F) if isinstance(x, np.uint16) else F(x)


@cuda.jit(device=True)
def _store(out, at, x):
    """Write a float32, rounded to the nearest value of the array's type, ties to even; NaN stays
    NaN.
    """
    if isinstance(out[at], np.uint16):
        u = F(x).view(np.uint32)
        out[at] = (u + 0x7FFF + ((u >> 16) & 1)) >> 16 if x == x else 0x7FC0
    else:
        out[at] = x


@cuda.jit(device=True)
def _part(x, at, end):
    """The largest of a lane's tokens and the sum of exp below it; the next of them is LANES places
    on.
    """
    largest, total = LOWEST, F(0.0)
    while at + AT(LANES * (EACH - 1)) < end:
        above, more = largest, F(0.0)
        for i in range(EACH):
            above = max(above, _load(x[at + AT(LANES * i)]))
        for i in range(EACH):
            more += F(exp(_load(x[at + AT(LANES * i)]) - above))
        total = total * F(exp(largest - above)) + more
        largest = above
        at += AT(LANES * EACH)
    while at < end:
        above = max(largest, _load(x[at]))
        total = total * F(exp(largest - above)) + F(exp(_load(x[at]) - above))
        largest = above
        at += AT(LANES)
    return largest, total


@cuda.jit(device=True)
def _normaliser(x, start, size):
    """Largest value of a row and log of the sum of exp below it, for the first lane; NaN where the
    row holds one.
    """
    lane, own = cuda.threadIdx.x, cuda.threadIdx.y * LANES + cuda.threadIdx.x
    largest, total = _part(x, AT(start + lane), AT(start + size))
    parts = cuda.shared.array(0, types.float32)  # maxima of the lanes, then their sums
    sums = LANES * ROWS + own
    cuda.syncthreads()  # the node before may still be read
    parts[own] = largest
    parts[sums] = total
    half = LANES // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            a, b = parts[own], parts[own + half]
            above = max(a, b)
            parts[sums] = parts[sums] * F(exp(a - above)) + parts[sums + half] * F(exp(b - above))
            parts[own] = above
        half //= 2
    return (parts[own], F(log(parts[sums]))) if lane == 0 else (F(0.0), F(0.0))


@cuda.jit(device=True)
def _frame_and_row(place, width):
    """Quotient and rest of a place among the nodes of an utterance; a division in 32 bits takes
    fewer instructions.
    """
    t = np.int64(np.uint32(place) // np.uint32(width))
    return t, place - t * width


@cuda.jit
def _scores(logits, targets, table, V, blank, fused, z, stay, emit, durations):
    b, n = cuda.blockIdx.y, durations.shape[1]
    U1 = table[b, LABELS] + 1
    size = table[b, FRAMES] * U1
    for first in range(cuda.blockIdx.x * ROWS, size, cuda.gridDim.x * ROWS):
        place = min(
            first + cuda.threadIdx.y, size - 1
        )  # warps left over take the last node once more: none may miss a barrier
        t, u = _frame_and_row(place, U1)
        node, start = (
            table[b, FIRST_NODE] + place,
            table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP],
        )
        largest, rest = _normaliser(logits, start, V) if fused else (F(0.0), F(0.0))
        longest, apart = _normaliser(logits, start + V, n) if n > 0 else (F(0.0), F(0.0))
        if cuda.threadIdx.x == 0:
            z[node] = largest + rest
            stay[node] = (
                _load(logits[start + blank]) - largest - rest
            )  # less is lost than with their sum, which is rounded
            emit[node] = (
                _load(logits[start + targets[b, u]]) - largest - rest if u + 1 < U1 else -inf
            )
            for i in range(n):
                durations[node, i] = _load(logits[start + V + i]) - longest - apart


@cuda.jit(device=True)
def _limited(grad, clamp, scale):
    return (F(copysign(clamp, grad)) if abs(grad) > clamp else grad) * scale


@cuda.jit(device=True)
def _fill(out, at, end):
    """Zeros in a lane's places."""
    while at < end:
        _store(out, at, F(0.0))
        at += AT(LANES)


@cuda.jit(device=True)
def _softmax(x, at, end, out, to, z, share, clamp, scale):
    """share exp(x - z), clamped and times `scale`, in a lane's places; `out` may be `x`, for no
    lane reads another's.
    """
    values = cuda.local.array(EACH, types.float32)
    while at + AT(LANES * (EACH - 1)) < end:
        for i in range(EACH):
            values[i] = _load(x[at + AT(LANES * i)])
        for i in range(EACH):
            grad = share * F(exp(values[i] - z))
            _store(out, to + AT(LANES * i), (clamp if grad > clamp else grad) * scale)
        at += AT(LANES * EACH)
        to += AT(LANES * EACH)
    while at < end:
        grad = share * F(exp(_load(x[at]) - z))
        _store(out, to, (clamp if grad > clamp else grad) * scale)
        at += AT(LANES)
        to += AT(LANES)


@cuda.jit(device=True)
def _node(x, start, out, first, V, blank, label, fused, clamp, z, stay, emit, scale):
    """Gradient over the tokens of a node; the lanes that own blank and label make these two apart,
    from what they read first.
    """
    lane, share = cuda.threadIdx.x, stay + emit if fused else F(0.0)
    has_blank, has_label = lane == blank % LANES, label >= 0 and lane == label % LANES
    at_blank, at_label = -stay, -emit
    if share != F(0.0) and has_blank:
        at_blank += share * F(exp(_load(x[start + blank]) - z))
    if share != F(0.0) and has_label:
        at_label += share * F(exp(_load(x[start + label]) - z))
    if share != F(0.0):
        _softmax(x, AT(start + lane), AT(start + V), out, AT(first + lane), z, share, clamp, scale)
    else:
        _fill(out, AT(first + lane), AT(first + V))
    if has_blank:
        _store(out, first + blank, _limited(at_blank, clamp, scale))
    if has_label:
        _store(out, first + label, _limited(at_label, clamp, scale))


@cuda.jit
def _gradient(
    logits,
    out,
    targets,
    table,
    own,
    V,
    blank,
    fused,
    clamp,
    z,
    blank_posterior,
    label_posterior,
    duration_gradient,
    incoming,
):
    b, n, lane = cuda.blockIdx.y, duration_gradient.shape[1], cuda.threadIdx.x
    T, U1, width, scale = table[b, FRAMES], table[b, LABELS] + 1, table[b, ROW_NODES], incoming[b]
    for place in range(
        cuda.blockIdx.x * ROWS + cuda.threadIdx.y,
        table[b, ROW_FRAMES] * width,
        cuda.gridDim.x * ROWS,
    ):
        t, u = _frame_and_row(place, width)
        first = own[b, FIRST_LOGIT] + t * own[b, FRAME_STEP] + u * own[b, LABEL_STEP]
        if t >= T or u >= U1:
            _fill(out, AT(first + lane), AT(first + V + n))
            continue
        node = table[b, FIRST_NODE] + t * U1 + u
        start = table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]
        label = targets[b, u] if u + 1 < U1 else -1
        _node(
            logits,
            start,
            out,
            first,
            V,
            blank,
            label,
            fused,
            clamp,
            z[node],
            blank_posterior[node],
            label_posterior[node],
            scale,
        )
        for i in range(lane, n, LANES):
            _store(out, first + V + i, _limited(duration_gradient[node, i], clamp, scale))
