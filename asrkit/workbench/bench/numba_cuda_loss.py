"""The transducer loss as CUDA kernels of Numba: both passes over the logits, and the lattice.

Notebook 03 explains them, and the suite of losses times them beside Triton's, which are faster.

Passes: a warp takes a lattice node and its lanes share the tokens, so neighbouring lanes read
neighbouring logits: EACH tokens at a time, read before any is used or written, so that as many
reads are under way. Floor: the logits are read twice and the gradient is written once, 3 x 4 B T U1
V bytes in float32, half of that in half precision. Sums over tokens and exp are float32 (the
relative error of exp(x) is about 1e-7 |x|, harmless where exp is small).

Lattice: anti-diagonal after anti-diagonal, forward and backward variables at the same time. A block
takes one direction of one utterance, T + U1 - 1 barriers long; its threads share the nodes of a
diagonal, and shared memory holds the latest two diagonals. Sums are float64: a diagonal waits for
memory and barriers rather than for arithmetic, and float32 would lose digits that the other
implementations keep. Memory: 16 bytes a node for both sums, 8 for both posteriors.

Indices into the logits are unsigned 64-bit integers: Numba checks at every access whether a signed
index is negative, that is, counts from the end. Reads are as wide as a logit, so it does not matter
whether a row starts at a multiple of 16 bytes. bfloat16 comes as bit patterns, since NumPy has
none.
"""

import math
import sys
from math import inf, log, log1p
from typing import Any

import numpy as np
import torch
from numba import cuda, types
from numba.cuda.core import config
from torch import Tensor

from asrkit.losses.gradient import LatticeLoss, Saved
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
    Reduction,
    as_index,
    check_lengths,
    reduce,
)
from asrkit.shapes import dims, expect

SIMULATED = config.ENABLE_CUDASIM
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
THREADS = 256  # of a block of the lattice, at most
WIDEST = 3072  # two diagonals of float64 in the 48 KiB of shared memory that every device has
F = np.float32
AT = np.uint64
LOWEST = np.finfo(F).min


def rnnt_loss_numba_cuda(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    reduction: Reduction = "mean",
    overwrite_logits: bool = False,
) -> Tensor:
    """`asrkit.losses.rnnt_loss` by these kernels, in nats; blank is the last token.

    Args:
        logits: (B, T, U1, V), float32, float16 or bfloat16, on a GPU; in Numba's simulator
            (NUMBA_ENABLE_CUDASIM=1 before Python starts) on a CPU.
        targets: labels (B, U), int32 or int64.
        logit_lengths: frames (B,).
        target_lengths: labels (B,).
        reduction: "mean" or "sum" over the batch, or "none".
        overwrite_logits: write the gradient over the logits, which are contiguous then.

    Raises:
        ValueError: an argument does not fit.
    """
    _, T, U1, V = dims(logits, "B T U1 V", "logits")
    expect(U1 <= WIDEST, "logits", f"at most U1={WIDEST} lattice rows", U1)
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, -1, like=logits, T=T, U1=U1, V=V
    )
    costs: Any = LatticeLoss.apply(
        logits.contiguous(),
        as_index(targets, logits.device),
        Nodes.padded(logits, lengths),
        LatticeOptions(blank=V - 1, overwrite_logits=overwrite_logits),
        sys.modules[__name__],
        lattice,
    )
    return reduce(costs.float(), reduction)


def launch(
    kernel: Any, blocks: tuple[int, int], threads: int | tuple[int, int], *arguments, shared=0
) -> None:
    """Queue a kernel on torch's current stream, without waiting.

    Memory that torch frees before the kernel has run is given out again on the same stream only,
    hence to work that is queued behind the kernel. In Numba's simulator the tensors are the CPU's.

    Args:
        kernel: from cuda.jit.
        blocks: the grid.
        threads: of a block.
        arguments: tensors, of which the first is one, and numbers. Nothing is copied.
        shared: bytes of dynamic shared memory.
    """
    if SIMULATED:
        kernel[blocks, threads, 0, shared](*map(_array, arguments))
        return
    index = arguments[0].device.index
    with cuda.gpus[index]:
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        kernel[blocks, threads, stream, shared](*map(_array, arguments))


def _array(value: Any) -> Any:
    """A tensor as a CUDA array on the same memory, bfloat16 as uint16; a number as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.dtype == torch.bfloat16:
        value = value.view(torch.uint16)
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(value.numpy())
    return cuda.as_cuda_array(value, sync=False)


def blocks_for(sizes: Tensor, each: int) -> tuple[int, int]:
    """The grid for `sizes` (B,) pieces of work, of which a block takes `each` at a time."""
    blocks = (int(sizes.max()) + each - 1) // each
    return min(blocks, BLOCKS), len(sizes)


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Arc log-probabilities of all `nodes`, float32 (N,) each, from `logits` and `targets`."""
    arcs = ArcLogProbs.empty(logits, nodes, 0)
    launch(
        _scores,
        blocks_for(nodes.sizes, ROWS),
        (LANES, ROWS),
        logits.view(-1),
        targets.contiguous(),
        nodes.on(logits.device),
        logits.shape[-1],
        arcs.log_z,
        arcs.blank_logp,
        arcs.label_logp,
        shared=8 * LANES * ROWS,
    )
    return arcs


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over all of `out`: as `asrkit.losses.wavefront.gradient`."""
    launch(
        _gradient,
        blocks_for(nodes.padded_sizes, ROWS),
        (LANES, ROWS),
        logits.view(-1),
        out.view(-1),
        targets.contiguous(),
        nodes.on(logits.device),
        logits.shape[-1],
        saved.log_z,
        saved.blank_posterior,
        saved.label_posterior,
        incoming.float().contiguous(),
    )


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs are float32, sums float64.
    """
    _, U1 = nodes.longest
    directions = 2 if grad else 1  # backward variables and, with `grad`, forward variables
    sums = arcs.log_z.new_empty((directions, nodes.count), dtype=torch.float64)
    log_likelihood = sums.new_empty(len(nodes.table))
    given = (arcs.blank_logp, arcs.label_logp, nodes.on(sums.device), sums)
    warps = (U1 + LANES - 1) // LANES
    threads = min(THREADS, warps * LANES)
    blocks = (len(log_likelihood), directions)
    launch(_sweep, blocks, threads, *given, log_likelihood, shared=16 * U1)
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    grid = blocks_for(nodes.sizes, THREADS)
    launch(_posteriors, grid, THREADS, *given, blank_posterior, label_posterior)
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior)


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
def _scores(logits, targets, table, V, log_z, blank_logp, label_logp):
    b = cuda.blockIdx.y
    U1 = table[b, LABELS] + 1
    size = table[b, FRAMES] * U1
    for first in range(cuda.blockIdx.x * ROWS, size, cuda.gridDim.x * ROWS):
        # warps left over take the last node once more: none may miss a barrier
        place = min(first + cuda.threadIdx.y, size - 1)
        t, u = _frame_and_row(place, U1)
        node = table[b, FIRST_NODE] + place
        start = _first_logit(table, b, t, u)
        largest, rest = _log_normaliser(logits, start, V)
        if cuda.threadIdx.x == 0:
            # less is lost by subtracting both than with their sum, which is rounded
            log_z[node] = largest + rest
            blank_logp[node] = _load(logits[start + V - 1]) - largest - rest
            at_label = -inf
            if u + 1 < U1:
                at_label = _load(logits[start + targets[b, u]]) - largest - rest
            label_logp[node] = at_label


@cuda.jit(device=True)
def _fill(out, at, end):
    """Zeros in a lane's places."""
    while at < end:
        _store(out, at, F(0.0))
        at += AT(LANES)


@cuda.jit(device=True)
def _softmax(x, out, at, end, log_z, factor):
    """factor exp(x - log_z) in a lane's places; `out` may be `x`, for no lane reads another's."""
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


@cuda.jit
def _gradient(logits, out, targets, table, V, log_z, blank_posterior, label_posterior, incoming):
    b = cuda.blockIdx.y
    lane = cuda.threadIdx.x
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    width = table[b, PADDED_ROWS]
    size = table[b, PADDED_FRAMES] * width
    scale = incoming[b]
    blank = V - 1
    begin = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    for place in range(begin, size, cuda.gridDim.x * ROWS):
        t, u = _frame_and_row(place, width)
        start = _first_logit(table, b, t, u)
        at = AT(start + lane)
        end = AT(start + V)
        if t >= T or u >= U1:
            _fill(out, at, end)
            continue
        node = table[b, FIRST_NODE] + t * U1 + u
        at_blank = -blank_posterior[node]
        at_label = -label_posterior[node]
        label = -1
        if u + 1 < U1:
            label = targets[b, u]
        # the lanes that own blank and label compute these two apart, from what they read first
        has_blank = lane == blank % LANES
        has_label = label >= 0 and lane == label % LANES
        posterior = blank_posterior[node] + label_posterior[node]
        if posterior != F(0.0):
            if has_blank:
                at_blank += posterior * F(exp(_load(logits[start + blank]) - log_z[node]))
            if has_label:
                at_label += posterior * F(exp(_load(logits[start + label]) - log_z[node]))
            _softmax(logits, out, at, end, log_z[node], posterior * scale)
        else:
            _fill(out, at, end)
        if has_blank:
            _store(out, start + blank, at_blank * scale)
        if has_label:
            _store(out, start + label, at_label * scale)


@cuda.jit(device=True)
def log_add(a, b):
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    larger = a
    smaller = b
    if a < b:
        larger = b
        smaller = a
    if smaller != -inf:
        larger += log1p(math.exp(smaller - larger))
    return larger


@cuda.jit
def _sweep(blank_logp, label_logp, table, sums, log_likelihood):
    """log beta(t, u) in row 0 of `sums`; log alpha(t, u) in row 1, by the same steps through the
    lattice turned by 180 degrees.
    """
    b = cuda.blockIdx.x
    direction = cuda.blockIdx.y
    forward = direction == 1
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    first = table[b, FIRST_NODE]
    last = first + T * U1 - 1
    diagonals = cuda.shared.array(0, types.float64)
    for k in range(T + U1 - 1):
        here = k % 2 * U1
        before = (k + 1) % 2 * U1
        least = max(0, k - T + 1)
        end = min(k + 1, U1)
        for u in range(least + cuda.threadIdx.x, end, cuda.blockDim.x):
            place = (k - u) * U1 + u
            node = cuda.selp(forward, first + place, last - place)
            # the nodes that the two arcs into this one leave, seen in the sweep's direction
            blank_from = cuda.selp(forward, node - U1, node)
            label_from = cuda.selp(forward, node - 1, node)
            x = -inf
            if k == 0:
                if forward:
                    x = 0.0
                else:
                    x = np.float64(blank_logp[last])
            if u < k:
                x = diagonals[before + u] + blank_logp[blank_from]
            if u > 0:
                by_label = diagonals[before + u - 1] + label_logp[label_from]
                x = log_add(x, by_label)
            diagonals[here + u] = x
            sums[direction, node] = x
        cuda.syncthreads()
    if cuda.threadIdx.x == 0 and not forward:
        log_likelihood[b] = sums[0, first]


@cuda.jit
def _posteriors(blank_logp, label_logp, table, sums, blank_posterior, label_posterior):
    b = cuda.blockIdx.y
    U1 = table[b, LABELS] + 1
    first = table[b, FIRST_NODE]
    size = table[b, FRAMES] * U1
    # an utterance without any path gets posteriors of 0 rather than 0 / 0
    total = sums[0, first]
    if total == -inf:
        total = 0.0
    thread = cuda.grid(2)[0]
    threads = cuda.gridsize(2)[0]
    for place in range(thread, size, threads):
        node = first + place
        u = place % U1
        alpha = sums[1, node] - total
        after_blank = -inf
        if place + U1 < size:
            after_blank = sums[0, node + U1]
        elif u + 1 == U1:
            after_blank = 0.0
        log_posterior = alpha + blank_logp[node] + after_blank
        blank_posterior[node] = math.exp(log_posterior)
        posterior = 0.0
        if u + 1 < U1:
            log_posterior = alpha + label_logp[node] + sums[0, node + 1]
            posterior = math.exp(log_posterior)
        label_posterior[node] = posterior
