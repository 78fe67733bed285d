"""Both passes over the logits as CUDA kernels: log-softmax fused with the arc log-probabilities,
softmax fused with the gradient.

A warp takes a lattice node and its lanes share the tokens, so neighbouring lanes read neighbouring
logits: EACH tokens at a time, read before any is used or written, so that as many reads are under
way. Floor: the logits are read twice and the gradient is written once, 3 x 4 B T U1 V bytes in
float32, half of that in half precision. Sums over tokens and exp are float32 (the relative error of
exp(x) is about 1e-7 |x|, harmless where exp is small).

Indices into the logits are unsigned 64-bit integers: Numba checks at every access whether a signed
index is negative, that is, counts from the end. Reads are as wide as a logit, so it does not matter
whether a row starts at a multiple of 16 bytes. bfloat16 comes as bit patterns, since NumPy has
none.
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

# Numba warns of grids with few blocks, but there is no more work than one block for each lattice.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
LANES = 32  # threads that share a node, a power of two
ROWS = 4  # nodes that a block takes at a time
EACH = 8  # tokens that a lane reads at a time
BLOCKS = 4096  # for each utterance at most; they go on to further nodes in strides
F = np.float32
AT = np.uint64
LOWEST = np.finfo(F).min


def launch(
    kernel, blocks: tuple[int, int], threads: int | tuple[int, int], *arguments, shared: int = 0
) -> None:
    """Queue a kernel on torch's current stream, without waiting.

    Memory that torch frees before the kernel has run is given out again on the same stream only,
    hence to work that is queued behind the kernel. In Numba's simulator the tensors are the CPU's.

    Args:
        kernel: from cuda.jit.
        blocks: the grid.
        threads: of a block.
        arguments: of the kernel. Tensors, of which the first is one, are passed without a copy.
        shared: bytes of dynamic shared memory.
    """
    values = as_bits(arguments)
    if SIMULATED:
        kernel[blocks, threads, 0, shared](*map(_simulated_array, values))
        return
    index = values[0].device.index
    with cuda.gpus[index]:
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        kernel[blocks, threads, stream, shared](*map(_cuda_array, values))


def _simulated_array(value: object) -> object:
    """A tensor as an array of Numba's simulator; anything else as it is."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    if isinstance(value, Tensor):
        return FakeCUDAArray(value.numpy())
    return value


def _cuda_array(value: object) -> object:
    """A tensor as a CUDA array on the same memory; anything else as it is."""
    if isinstance(value, Tensor):
        return cuda.as_cuda_array(value, sync=False)
    return value


def as_bits(arguments: tuple) -> list:
    """The arguments with tensors detached, and bfloat16 as bit patterns: uint16."""
    values = []
    for value in arguments:
        if isinstance(value, Tensor):
            value = value.detach()
            if value.dtype == torch.bfloat16:
                value = value.view(torch.uint16)
        values.append(value)
    return values


def blocks_for(nodes: Nodes, sizes: Tensor, each: int = 1) -> tuple[int, int]:
    """The grid for `sizes` (B,) pieces of work in the utterances of `nodes`.

    A block takes `each` of them at a time.
    """
    most = int(sizes.max())
    blocks = (most + each - 1) // each
    return min(blocks, BLOCKS), len(nodes.table)


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Arc log-probabilities of all `nodes`, (N,) each, from `logits`, `targets` and `options`.

    They are float32.
    """
    device = logits.device
    log_z, blank_logp, label_logp = torch.empty((3, nodes.count), device=device).unbind()
    launch(
        _scores,
        blocks_for(nodes, nodes.sizes, ROWS),
        (LANES, ROWS),
        flat(logits),
        targets.contiguous(),
        nodes.on(device),
        logits.shape[-1],
        options.blank,
        options.fused_log_softmax,
        log_z,
        blank_logp,
        label_logp,
        shared=8 * LANES * ROWS,
    )
    return ArcLogProbs(log_z, blank_logp, label_logp)


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over the `logits` into all of `out`.

    Takes logits, out, targets, nodes, options, saved and incoming as
    asrkit.losses.gradient.LogitRows says.
    """
    out_nodes = nodes
    if out.stride() != logits.stride():
        out_nodes = nodes.strided_like(out)
    clamp = inf
    if options.clamp > 0:
        clamp = options.clamp
    launch(
        _gradient,
        blocks_for(nodes, nodes.padded_sizes, ROWS),
        (LANES, ROWS),
        flat(logits),
        flat(out),
        targets.contiguous(),
        nodes.on(logits.device),
        out_nodes.on(logits.device),
        logits.shape[-1],
        options.blank,
        options.fused_log_softmax,
        F(clamp),
        saved.log_z,
        saved.blank_posterior,
        saved.label_posterior,
        incoming.float().contiguous(),
    )


@cuda.jit(device=True)
def _load(x):
    """A logit as float32. The compiler knows the answer of isinstance, so each dtype has kernels of
    its own.
    """
    if isinstance(x, np.uint16):
        bits = np.uint32(x) << 16
        return np.uint32(bits).view(F)
    return F(x)


@cuda.jit(device=True)
def _store(out, at, x):
    """Write a float32, rounded to the nearest value of the array's dtype, ties to even; NaN stays
    NaN.
    """
    if isinstance(out[at], np.uint16):
        u = F(x).view(np.uint32)
        odd = (u >> 16) & 1
        # a conditional expression becomes a select instruction, an if statement a branch
        out[at] = (u + 0x7FFF + odd) >> 16 if x == x else 0x7FC0
    else:
        out[at] = x


@cuda.jit(device=True)
def _lane_sum(x, at, end):
    """The largest of a lane's tokens, and the sum of exp below it; its tokens are LANES apart."""
    largest = LOWEST
    total = F(0.0)
    while at + AT(LANES * (EACH - 1)) < end:
        above = largest
        more = F(0.0)
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
def _log_normaliser(x, start, size):
    """Largest value of a row and log of the sum of exp below it, for the first lane; NaN where the
    row holds one.
    """
    lane = cuda.threadIdx.x
    own = cuda.threadIdx.y * LANES + lane
    largest, total = _lane_sum(x, AT(start + lane), AT(start + size))
    parts = cuda.shared.array(0, types.float32)  # maxima of the lanes, then their sums
    sums = LANES * ROWS + own
    cuda.syncthreads()  # the node before may still be read
    parts[own] = largest
    parts[sums] = total
    half = LANES // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            a = parts[own]
            b = parts[own + half]
            above = max(a, b)
            from_a = F(exp(a - above))
            from_b = F(exp(b - above))
            parts[sums] = parts[sums] * from_a + parts[sums + half] * from_b
            parts[own] = above
        half //= 2
    if lane == 0:
        return parts[own], F(log(parts[sums]))
    return F(0.0), F(0.0)


@cuda.jit(device=True)
def _frame_and_row(place, width):
    """Quotient and remainder of a place among the nodes of an utterance; a division in 32 bits
    takes fewer instructions.
    """
    t = np.int64(np.uint32(place) // np.uint32(width))
    return t, place - t * width


@cuda.jit(device=True)
def _first_logit(table, b, t, u):
    """Element of the logits' storage at which node (t, u) of utterance b starts."""
    return table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]


@cuda.jit
def _scores(logits, targets, table, V, blank, fused, log_z, blank_logp, label_logp):
    b = cuda.blockIdx.y
    U1 = table[b, LABELS] + 1
    size = table[b, FRAMES] * U1
    for first in range(cuda.blockIdx.x * ROWS, size, cuda.gridDim.x * ROWS):
        # warps left over take the last node once more: none may miss a barrier
        place = min(first + cuda.threadIdx.y, size - 1)
        t, u = _frame_and_row(place, U1)
        node = table[b, FIRST_NODE] + place
        start = _first_logit(table, b, t, u)
        largest = F(0.0)
        rest = F(0.0)
        if fused:
            largest, rest = _log_normaliser(logits, start, V)
        if cuda.threadIdx.x == 0:
            # less is lost by subtracting both than with their sum, which is rounded
            log_z[node] = largest + rest
            blank_logp[node] = _load(logits[start + blank]) - largest - rest
            at_label = -inf
            if u + 1 < U1:
                at_label = _load(logits[start + targets[b, u]]) - largest - rest
            label_logp[node] = at_label


@cuda.jit(device=True)
def _limited(grad, clamp, scale):
    if abs(grad) > clamp:
        grad = F(copysign(clamp, grad))
    return grad * scale


@cuda.jit(device=True)
def _fill(out, at, end):
    """Zeros in a lane's places."""
    while at < end:
        _store(out, at, F(0.0))
        at += AT(LANES)


@cuda.jit(device=True)
def _softmax(x, at, end, out, to, log_z, posterior, clamp, scale):
    """posterior exp(x - log_z), clamped and times `scale`, in a lane's places; `out` may be `x`,
    for no lane reads another's.
    """
    values = cuda.local.array(EACH, types.float32)
    while at + AT(LANES * (EACH - 1)) < end:
        for i in range(EACH):
            values[i] = _load(x[at + AT(LANES * i)])
        for i in range(EACH):
            grad = posterior * F(exp(values[i] - log_z))
            if grad > clamp:
                grad = clamp
            _store(out, to + AT(LANES * i), grad * scale)
        at += AT(LANES * EACH)
        to += AT(LANES * EACH)
    while at < end:
        grad = posterior * F(exp(_load(x[at]) - log_z))
        if grad > clamp:
            grad = clamp
        _store(out, to, grad * scale)
        at += AT(LANES)
        to += AT(LANES)


@cuda.jit(device=True)
def _node_gradient(
    x,
    start,
    out,
    first,
    V,
    blank,
    label,
    fused,
    clamp,
    log_z,
    blank_posterior,
    label_posterior,
    scale,
):
    """Gradient over the tokens of a node; the lanes that own blank and label compute these two
    apart, from what they read first.
    """
    lane = cuda.threadIdx.x
    posterior = F(0.0)
    if fused:
        posterior = blank_posterior + label_posterior
    has_blank = lane == blank % LANES
    has_label = label >= 0 and lane == label % LANES
    at_blank = -blank_posterior
    at_label = -label_posterior
    if posterior != F(0.0) and has_blank:
        at_blank += posterior * F(exp(_load(x[start + blank]) - log_z))
    if posterior != F(0.0) and has_label:
        at_label += posterior * F(exp(_load(x[start + label]) - log_z))
    at = AT(start + lane)
    to = AT(first + lane)
    if posterior != F(0.0):
        _softmax(x, at, AT(start + V), out, to, log_z, posterior, clamp, scale)
    else:
        _fill(out, to, AT(first + V))
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
    out_table,
    V,
    blank,
    fused,
    clamp,
    log_z,
    blank_posterior,
    label_posterior,
    incoming,
):
    b = cuda.blockIdx.y
    lane = cuda.threadIdx.x
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    width = table[b, ROW_NODES]
    size = table[b, ROW_FRAMES] * width
    scale = incoming[b]
    begin = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    for place in range(begin, size, cuda.gridDim.x * ROWS):
        t, u = _frame_and_row(place, width)
        first = _first_logit(out_table, b, t, u)
        if t >= T or u >= U1:
            _fill(out, AT(first + lane), AT(first + V))
            continue
        node = table[b, FIRST_NODE] + t * U1 + u
        start = _first_logit(table, b, t, u)
        label = -1
        if u + 1 < U1:
            label = targets[b, u]
        _node_gradient(
            logits,
            start,
            out,
            first,
            V,
            blank,
            label,
            fused,
            clamp,
            log_z[node],
            blank_posterior[node],
            label_posterior[node],
            scale,
        )
