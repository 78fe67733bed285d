"""The transducer loss in CUDA kernels of Numba, for GPUs without Triton, such as those of Windows.

Passes over the logits: a warp processes one node and its lanes share the tokens, so neighbouring
lanes read neighbouring logits. A lane reads EACH tokens before it uses the first, so that several
reads are under way. Floor: the logits are read twice and the gradient is written once, 3 x 4 B T U1
V bytes in float32, half of that in half precision. Sums over tokens and exp are float32. Half
precision is read and written as it is: no copy of the logits in float32 exists. bfloat16 is read as
bit patterns, since NumPy has no such type. Indices into the logits are unsigned: Numba checks a
signed index at every access, because a negative one counts from the end.

Lattice of RNN-T and TDT: a block computes one direction of one utterance, anti-diagonal by
anti-diagonal, with a barrier after each. Its threads share the nodes of a diagonal. Sums pass from
diagonal to diagonal through memory, so that an arc may start on any earlier diagonal: d diagonals
back for a blank with a duration of d frames, d + 1 for a label. Sums are float64: a diagonal waits
for memory and barriers rather than for arithmetic, and float32 would lose digits that the other
implementations keep. Memory: 16 bytes a node for the sums, 8 for the posteriors, and 4 for each
duration.

Without a GPU the kernels run in Numba's simulator (NUMBA_ENABLE_CUDASIM=1 before Python starts).
"""

import math
from math import inf, log1p
from typing import Any

import numpy as np
import torch
from numba import cuda, types
from numba.cuda.core import config
from torch import Tensor

from asrkit.compilers import SIMULATED
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
    ArcPosteriors,
    LatticeOptions,
    Nodes,
    Saved,
)

if SIMULATED:
    from numpy import exp
else:
    from numba.cuda.libdevice import fast_expf as exp

# Numba warns of small grids, but there is only one block of work per lattice and direction.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
LANES = 32  # threads that share a node, a power of two
ROWS = 4  # nodes that a block processes at a time
EACH = 8  # tokens that a lane reads at a time
BLOCKS = 4096  # most blocks per utterance; each processes several nodes in strides
THREADS = 256  # most threads of a block of the lattice
F = np.float32
AT = np.uint64
LOWEST = np.finfo(F).min


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Return the arc log-probabilities of all `nodes`, float32, (N,) each."""
    n = len(options.durations)
    arcs = ArcLogProbs.empty(logits, nodes, n)
    launch(
        _scores,
        _grid(nodes.sizes, ROWS),
        (LANES, ROWS),
        logits.view(-1),
        targets.contiguous(),
        nodes.on(logits.device),
        logits.shape[-1] - n,
        options.blank,
        options.fused_log_softmax,
        *arcs,
    )
    return arcs


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Return log-likelihoods and, with `grad`, posteriors of the `arcs`.

    Arcs are float32, sums float64. It reads `durations` and `fastemit_lambda` from `options`.
    """
    T, U1 = nodes.longest
    directions = 2 if grad else 1  # backward variables and, with `grad`, forward variables
    _, *logps = arcs
    sums = arcs.log_z.new_empty((directions, nodes.count), dtype=torch.float64)
    log_likelihood = sums.new_empty(len(nodes.table))
    inputs = (*logps, nodes.on(sums.device), tuple(options.steps(T)), sums)
    threads = min(THREADS, LANES * math.ceil(min(T, U1) / LANES))
    launch(_sweep, (len(log_likelihood), directions), threads, *inputs, log_likelihood)
    if not grad:
        return ArcPosteriors(log_likelihood)
    posteriors = [torch.empty_like(logp) for logp in logps]
    factor = 1.0 + options.fastemit_lambda
    launch(_posteriors, _grid(nodes.sizes, THREADS), THREADS, *inputs, factor, *posteriors)
    return ArcPosteriors(log_likelihood, *posteriors)


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
    launch(
        _gradient,
        _grid(nodes.padded_sizes, ROWS),
        (LANES, ROWS),
        logits.view(-1),
        out.view(-1),
        targets.contiguous(),
        nodes.on(logits.device),
        logits.shape[-1] - len(options.durations),
        options.blank,
        options.fused_log_softmax,
        *saved,
        incoming.float().contiguous(),
    )


def launch(
    kernel: Any, blocks: tuple[int, int], threads: int | tuple[int, int], *arguments: Any
) -> None:
    """Queue a kernel on torch's current stream, without waiting.

    If torch frees memory before the kernel has run, it reuses that memory on the same stream only,
    so for work that runs after the kernel.

    Args:
        kernel: A function of cuda.jit.
        blocks: Size of the grid.
        threads: Threads of a block.
        *arguments: Tensors, numbers and tuples of numbers; the first is a tensor. Tensors are not
            copied.
    """
    arrays = [_array(value) if isinstance(value, Tensor) else value for value in arguments]
    shared_bytes = 2 * F().nbytes * LANES * ROWS
    if SIMULATED:
        kernel[blocks, threads, 0, shared_bytes](*arrays)
        return
    index = arguments[0].device.index
    with cuda.gpus[index]:
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        kernel[blocks, threads, stream, shared_bytes](*arrays)


def _array(tensor: Tensor) -> Any:
    """Return a CUDA array, or the simulator's, on the tensor's memory; bfloat16 as uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(tensor.numpy())
    return cuda.as_cuda_array(tensor, sync=False)


def _grid(sizes: Tensor, each: int) -> tuple[int, int]:
    """Return the grid for utterances of `sizes` (B,) nodes, `each` of them in a block at a time."""
    return min(BLOCKS, math.ceil(int(sizes.max()) / each)), len(sizes)


@cuda.jit(device=True)
def _load(x):
    """A logit as float32. Each dtype has kernels of its own, so isinstance costs nothing."""
    if isinstance(x, np.uint16):
        bits = np.uint32(x) << 16
        return np.uint32(bits).view(F)
    return F(x)


@cuda.jit(device=True)
def _store(out, at, x):
    """Write a float32, rounded to the nearest value of the array's dtype, ties to even."""
    if isinstance(out[at], np.uint16):
        bits = F(x).view(np.uint32)
        odd = (bits >> 16) & 1
        # a conditional expression becomes a select instruction, an if statement a branch
        out[at] = (bits + 0x7FFF + odd) >> 16 if x == x else 0x7FC0
    else:
        out[at] = x


@cuda.jit(device=True)
def _lane_sum(x, at, end):
    """Return the largest of a lane's tokens, and the sum of exp relative to it."""
    largest = LOWEST
    total = F(0.0)
    while at + AT(LANES * (EACH - 1)) < end:
        updated = largest
        more = F(0.0)
        for i in range(EACH):
            updated = max(updated, _load(x[at + AT(LANES * i)]))
        for i in range(EACH):
            more += F(exp(_load(x[at + AT(LANES * i)]) - updated))
        total = total * F(exp(largest - updated)) + more
        largest = updated
        at += AT(LANES * EACH)
    while at < end:
        updated = max(largest, _load(x[at]))
        total = total * F(exp(largest - updated)) + F(exp(_load(x[at]) - updated))
        largest = updated
        at += AT(LANES)
    return largest, total


@cuda.jit(device=True)
def _log_normaliser(x, start, size):
    """Return the largest of a row's logits, and the log of the sum of exp relative to it.

    Lane 0 gets the result, which is NaN if a logit is NaN or inf, or if all are -inf.
    """
    lane = cuda.threadIdx.x
    own = cuda.threadIdx.y * LANES + lane
    largest, total = _lane_sum(x, AT(start + lane), AT(start + size))
    parts = cuda.shared.array(0, types.float32)  # maxima of the lanes, then their sums
    sums = LANES * ROWS + own
    cuda.syncthreads()  # other lanes may still read the parts of the row before
    parts[own] = largest
    parts[sums] = total
    half = LANES // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            updated = max(parts[own], parts[own + half])
            by_own = F(exp(parts[own] - updated))
            by_other = F(exp(parts[own + half] - updated))
            parts[sums] = parts[sums] * by_own + parts[sums + half] * by_other
            parts[own] = updated
        half //= 2
    if lane == 0:
        return parts[own], F(np.log(parts[sums]))
    return F(0.0), F(0.0)


@cuda.jit(device=True)
def _frame_and_row(place, width):
    """Return quotient and remainder; a division in 32 bits takes fewer instructions."""
    t = np.int64(np.uint32(place) // np.uint32(width))
    return t, place - t * width


@cuda.jit(device=True)
def _first_logit(table, b, t, u):
    """Return the index of the first logit of a node."""
    return table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]


@cuda.jit
def _scores(logits, targets, table, V, blank, fused, log_z, blank_logp, label_logp, duration_logp):
    b = cuda.blockIdx.y
    n = duration_logp.shape[1]
    U1 = table[b, LABELS] + 1
    size = table[b, FRAMES] * U1
    for first in range(cuda.blockIdx.x * ROWS, size, cuda.gridDim.x * ROWS):
        # a warp without a node processes the last one again, since all must reach the barriers
        place = min(first + cuda.threadIdx.y, size - 1)
        t, u = _frame_and_row(place, U1)
        node = table[b, FIRST_NODE] + place
        start = _first_logit(table, b, t, u)
        largest = rest = longest = spread = F(0.0)
        if fused:
            largest, rest = _log_normaliser(logits, start, V)
        if n > 0:
            longest, spread = _log_normaliser(logits, start + V, n)
        if cuda.threadIdx.x == 0:
            # subtracting both loses less than subtracting their rounded sum
            log_z[node] = largest + rest
            blank_logp[node] = _load(logits[start + blank]) - largest - rest
            label_logp[node] = -inf
            if u + 1 < U1:
                label_logp[node] = _load(logits[start + targets[b, u]]) - largest - rest
            for i in range(n):
                duration_logp[node, i] = _load(logits[start + V + i]) - longest - spread


@cuda.jit(device=True)
def _zeros(out, at, end):
    while at < end:
        _store(out, at, F(0.0))
        at += AT(LANES)


@cuda.jit(device=True)
def _softmax(x, out, at, end, log_z, factor):
    """Write factor exp(x - log_z). A lane reads what it overwrites itself: `out` may be `x`."""
    values = cuda.local.array(EACH, types.float32)
    while at + AT(LANES * (EACH - 1)) < end:
        for i in range(EACH):
            values[i] = _load(x[at + AT(LANES * i)])
        for i in range(EACH):
            _store(out, at + AT(LANES * i), factor * F(exp(values[i] - log_z)))
        at += AT(LANES * EACH)
    while at < end:
        _store(out, at, factor * F(exp(_load(x[at]) - log_z)))
        at += AT(LANES)


@cuda.jit(device=True)
def _token(x, at, log_z, posterior, by_arc, scale):
    """Return the gradient over blank or the next label, whose arc has the posterior `by_arc`."""
    grad = -by_arc
    if posterior != F(0.0):
        grad += posterior * F(exp(_load(x[at]) - log_z))
    return grad * scale


@cuda.jit
def _gradient(
    logits,
    out,
    targets,
    table,
    V,
    blank,
    fused,
    log_z,
    blank_posterior,
    label_posterior,
    duration_gradient,
    incoming,
):
    b = cuda.blockIdx.y
    lane = cuda.threadIdx.x
    n = duration_gradient.shape[1]
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    width = table[b, PADDED_ROWS]
    size = table[b, PADDED_FRAMES] * width
    scale = incoming[b]
    begin = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    for place in range(begin, size, cuda.gridDim.x * ROWS):
        t, u = _frame_and_row(place, width)
        start = _first_logit(table, b, t, u)
        at = AT(start + lane)
        end = AT(start + V)
        if t >= T or u >= U1:
            _zeros(out, at, end + AT(n))
            continue
        # The compiler cannot exclude that `out` overlaps these tensors, so each is read once.
        node = table[b, FIRST_NODE] + t * U1 + u
        z = log_z[node]
        by_blank = blank_posterior[node]
        by_label = label_posterior[node]
        posterior = by_blank + by_label if fused else F(0.0)
        label = targets[b, u] if u + 1 < U1 else np.int64(-1)
        # The lane of blank, and that of the label, read the logit before they overwrite it.
        has_blank = lane == blank % LANES
        has_label = label >= 0 and lane == label % LANES
        at_blank = at_label = F(0.0)
        if has_blank:
            at_blank = _token(logits, start + blank, z, posterior, by_blank, scale)
        if has_label:
            at_label = _token(logits, start + label, z, posterior, by_label, scale)
        if posterior != F(0.0):
            _softmax(logits, out, at, end, z, posterior * scale)
        else:
            _zeros(out, at, end)
        if has_blank:
            _store(out, start + blank, at_blank)
        if has_label:
            _store(out, start + label, at_label)
        for i in range(lane, n, LANES):
            _store(out, start + V + i, duration_gradient[node, i] * scale)


@cuda.jit(device=True)
def _log_add(a, b):
    """Return log(exp(a) + exp(b)), also for terms whose exp() would underflow."""
    larger = a
    smaller = b
    if a < b:
        larger = b
        smaller = a
    if smaller != -inf:
        larger += log1p(math.exp(smaller - larger))
    return larger


@cuda.jit(device=True)
def _duration(duration_logp, node, i):
    """Return the log-probability of a duration at `node`; 0 for RNN-T."""
    return duration_logp[node, i] if duration_logp.shape[1] > 0 else F(0.0)


@cuda.jit
def _sweep(blank_logp, label_logp, duration_logp, table, steps, sums, log_likelihood):
    """Write log beta(t, u) into row 0 of `sums`, and log alpha(t, u) into row 1.

    Row 1 takes the same steps through the lattice turned by 180 degrees. `steps` has the frames of
    the blank arc and of the label arc for each duration.
    """
    b = cuda.blockIdx.x
    row = cuda.blockIdx.y
    forward = row == 1
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    first = table[b, FIRST_NODE]
    last = first + T * U1 - 1
    back = -1 if forward else 1  # towards the nodes that are finished
    for k in range(T + U1 - 1):
        for u in range(max(0, k - T + 1) + cuda.threadIdx.x, min(k + 1, U1), cuda.blockDim.x):
            t = k - u
            node = first + t * U1 + u if forward else last - t * U1 - u
            x = 0.0 if forward and k == 0 else -inf
            for i in range(len(steps)):
                blank, label = steps[i]
                if 0 < blank <= t:
                    other = node + back * blank * U1
                    arc = other if forward else node
                    term = blank_logp[arc] + _duration(duration_logp, arc, i)
                    x = _log_add(x, sums[row, other] + term)
                if label <= t and u > 0:
                    other = node + back * (label * U1 + 1)
                    arc = other if forward else node
                    term = label_logp[arc] + _duration(duration_logp, arc, i)
                    x = _log_add(x, sums[row, other] + term)
                if blank == t + 1 and u == 0 and not forward:  # the last blank of a path
                    x = _log_add(x, blank_logp[node] + _duration(duration_logp, node, i))
            sums[row, node] = x
        cuda.syncthreads()  # the next diagonal reads what other threads wrote
    if cuda.threadIdx.x == 0 and not forward:
        log_likelihood[b] = sums[0, first]


@cuda.jit
def _posteriors(
    blank_logp,
    label_logp,
    duration_logp,
    table,
    steps,
    sums,
    label_factor,
    blank_posterior,
    label_posterior,
    duration_posterior,
):
    b = cuda.blockIdx.y
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    first = table[b, FIRST_NODE]
    # an utterance without a path gets posteriors of 0 instead of 0 / 0
    total = sums[0, first]
    if total == -inf:
        total = 0.0
    for place in range(cuda.grid(2)[0], T * U1, cuda.gridsize(2)[0]):
        t, u = _frame_and_row(place, U1)
        node = first + place
        blanks = labels = 0.0
        for i in range(len(steps)):
            blank, label = steps[i]
            here = sums[1, node] - total + _duration(duration_logp, node, i)
            by_blank = by_label = 0.0
            if blank > 0 and t + blank < T:
                by_blank = math.exp(here + blank_logp[node] + sums[0, node + blank * U1])
            elif t + blank == T and u + 1 == U1:
                by_blank = math.exp(here + blank_logp[node])
            if t + label < T and u + 1 < U1:
                after = sums[0, node + label * U1 + 1]
                by_label = math.exp(here + label_logp[node] + after) * label_factor
            if duration_posterior.shape[1] > 0:
                duration_posterior[node, i] = by_blank + by_label
            blanks += by_blank
            labels += by_label
        blank_posterior[node] = blanks
        label_posterior[node] = labels
