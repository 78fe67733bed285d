"""The RNN-T loss in CUDA kernels of Numba, for GPUs without Triton, such as those of Windows.

Passes over the logits: a warp processes one node and its lanes share the tokens, so neighbouring
lanes read neighbouring logits. A lane reads EACH tokens before it uses the first, so that several
reads are under way. Floor: the logits are read twice and the gradient is written once, 3 x 4 B T U1
V bytes in float32, half of that in half precision. Sums over tokens and exp are float32. Half
precision is read and written as it is: no copy of the logits in float32 exists. bfloat16 is read as
bit patterns, since NumPy has no such type. Indices into the logits are unsigned: Numba checks a
signed index at every access, because a negative one counts from the end.

Lattice: a block computes one direction of one utterance, anti-diagonal by anti-diagonal, with a
barrier after each. Its threads share the nodes of a diagonal. Sums are float64: a diagonal waits
for memory and barriers rather than for arithmetic, and float32 would lose digits that the other
implementations keep. Memory: 16 bytes a node for the sums, 8 for the posteriors.

Without a GPU the kernels run in Numba's simulator (NUMBA_ENABLE_CUDASIM=1 before Python starts).
"""

import math
from collections.abc import Sequence
from math import inf
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
    from numba.cuda.libdevice import fast_expf as exp  # type: ignore[no-redef]

# Numba warns of small grids, but there is only one block of work per lattice and direction.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
LANES = 32  # threads that share a node, a power of two
ROWS = 4  # nodes of a block
EACH = 8  # tokens that a lane reads at a time
THREADS = 256  # most threads of a block of the lattice
F = np.float32
AT = np.uint64
ZERO = F(0)
LOWEST = np.finfo(F).min


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Return the arc log-probabilities of all `nodes`, float32, (N,) each."""
    arcs = ArcLogProbs.empty(logits, nodes, 0)
    launch(
        _scores,
        nodes.longest,
        (LANES, ROWS),
        nodes.on(logits.device),
        logits.view(-1),
        targets.contiguous(),
        logits.shape[-1],
        options.blank,
        options.fused_log_softmax,
        *arcs[:3],
    )
    return arcs


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Return log-likelihoods and, with `grad`, posteriors of the `arcs`.

    Arcs are float32, sums float64. It reads `fastemit_lambda` from `options`.
    """
    _, U1 = nodes.longest
    directions = 2 if grad else 1  # backward variables and, with `grad`, forward variables
    sums = arcs.log_z.new_empty((directions, nodes.count), dtype=torch.float64)
    table = nodes.on(sums.device)
    inputs = (table, arcs.blank_logp, arcs.label_logp, sums)
    threads = min(THREADS, LANES * math.ceil(U1 / LANES))
    launch(_sweep, (directions, 1), (1, threads), *inputs)
    log_likelihood = sums[0, table[:, FIRST_NODE]]
    if not grad:
        return ArcPosteriors(log_likelihood)
    by_blank, by_label = torch.empty_like(arcs.log_z), torch.empty_like(arcs.log_z)
    factor = 1.0 + options.fastemit_lambda
    launch(_posteriors, nodes.longest, (1, threads), *inputs, factor, by_blank, by_label)
    return ArcPosteriors(log_likelihood, by_blank, by_label, arcs.duration_logp)


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
        nodes.table[:, PADDED_FRAMES:].amax(0).tolist(),
        (LANES, ROWS),
        nodes.on(logits.device),
        logits.view(-1),
        out.view(-1),
        targets.contiguous(),
        logits.shape[-1],
        options.blank,
        options.fused_log_softmax,
        *saved[:3],
        incoming.float().contiguous(),
    )


def launch(
    kernel: Any, size: Sequence[int], threads: tuple[int, int], table: Tensor, *arguments: Any
) -> None:
    """Queue a kernel on torch's current stream, without waiting.

    If torch frees memory before the kernel has run, it reuses that memory on the same stream only,
    so for work that runs after the kernel.

    Args:
        kernel: A function of cuda.jit. Index x of its grid is the frame, y a group of lattice rows,
            z the utterance.
        size: Largest number of frames, and of rows.
        threads: Threads of a row, and rows of a block.
        table: Table of nodes (B, 8), the first argument of the kernel.
        *arguments: Its other arguments: numbers, and tensors, which are not copied.
    """
    blocks = (size[0], math.ceil(size[1] / threads[1]), len(table))
    shared_bytes = 4 * LANES * ROWS  # of _log_normaliser
    if SIMULATED:
        kernel[blocks, threads, 0, shared_bytes](*map(_array, (table, *arguments)))
        return
    index = table.device.index
    with cuda.gpus[index]:
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        kernel[blocks, threads, stream, shared_bytes](*map(_array, (table, *arguments)))


def _array(value: Any) -> Any:
    """Return a CUDA array, or the simulator's, on a tensor's memory; bfloat16 as uint16."""
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(tensor.numpy())
    return cuda.as_cuda_array(tensor, sync=False)


@cuda.jit(device=True)
def _load(x, at):
    """Return a logit as float32. The compiler decides isinstance, once for each dtype."""
    value = x[at]
    if isinstance(value, np.uint16):
        bits = np.uint32(value) << 16
        return np.uint32(bits).view(F)
    return F(value)


@cuda.jit(device=True)
def _store(out, at, value):
    """Write a float32, rounded to the nearest value of the array's dtype, ties to even."""
    if isinstance(out[at], np.uint16):
        bits = F(value).view(np.uint32)
        odd = (bits >> 16) & 1
        # a conditional expression becomes a select instruction, an if statement a branch
        out[at] = (bits + 0x7FFF + odd) >> 16 if value == value else 0x7FC0
    else:
        out[at] = value


@cuda.jit(device=True)
def _log_add(a, b):
    """Return log(exp(a) + exp(b)), also for terms whose exp() would underflow."""
    larger = a
    smaller = b
    if a < b:
        larger = b
        smaller = a
    if smaller != -inf:
        larger += math.log1p(math.exp(smaller - larger))
    return larger


@cuda.jit(device=True)
def _join(x, at, end, each, largest, total):
    """Join a lane's tokens, `each` at a time, to the largest and the sum of exp relative to it.

    Fewer than `each` remain, from the returned place on.
    """
    while at + AT(LANES * (each - 1)) < end:
        updated = largest
        for i in range(each):
            updated = max(updated, _load(x, at + AT(LANES * i)))
        total *= exp(largest - updated)
        for i in range(each):
            total += exp(_load(x, at + AT(LANES * i)) - updated)
        largest = updated
        at += AT(LANES * each)
    return at, largest, total


@cuda.jit(device=True)
def _log_normaliser(x, start, V):
    """Return the log of the sum of exp over the V logits of a node, in lane 0.

    It is NaN if a logit is NaN or inf, and -inf if all are -inf.
    """
    lane = cuda.threadIdx.x
    end = AT(start + V)
    at, largest, total = _join(x, AT(start + lane), end, EACH, LOWEST, ZERO)
    _, largest, total = _join(x, at, end, 1, largest, total)
    parts = cuda.shared.array(0, types.float32)
    own = cuda.threadIdx.y * LANES + lane
    parts[own] = largest + F(np.log(total))
    half = LANES // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            parts[own] = _log_add(parts[own], parts[own + half])
        half //= 2
    return parts[own]


@cuda.jit(device=True)
def _first_logit(table, b, t, u):
    """Return the index of the first logit of a node."""
    return table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]


@cuda.jit
def _scores(table, logits, targets, V, blank, fused, log_z, blank_logp, label_logp):
    t = cuda.blockIdx.x
    b = cuda.blockIdx.z
    U1 = table[b, LABELS] + 1
    if t >= table[b, FRAMES]:
        return
    # a warp without a node processes the last one again, since all must reach the barriers
    u = min(cuda.blockIdx.y * ROWS + cuda.threadIdx.y, U1 - 1)
    node = table[b, FIRST_NODE] + t * U1 + u
    start = _first_logit(table, b, t, u)
    z = _log_normaliser(logits, start, V) if fused else ZERO
    if cuda.threadIdx.x == 0:
        log_z[node] = z
        blank_logp[node] = _load(logits, start + blank) - z
        label_logp[node] = -inf
        if u + 1 < U1:
            label_logp[node] = _load(logits, start + targets[b, u]) - z


@cuda.jit(device=True)
def _softmax(x, out, at, end, each, z, factor):
    """Write factor exp(x - z) over a lane's tokens, `each` at a time, read before the first write.

    Fewer than `each` remain, from the returned place on. For a factor of 0 nothing is read.
    """
    values = cuda.local.array(EACH, types.float32)
    while at + AT(LANES * (each - 1)) < end:
        for i in range(each):
            values[i] = ZERO
        if factor != ZERO:
            for i in range(each):
                values[i] = factor * exp(_load(x, at + AT(LANES * i)) - z)
        for i in range(each):
            _store(out, at + AT(LANES * i), values[i])
        at += AT(LANES * each)
    return at


@cuda.jit
def _gradient(
    table,
    logits,
    out,
    targets,
    V,
    blank,
    fused,
    log_z,
    blank_posterior,
    label_posterior,
    incoming,
):
    t = cuda.blockIdx.x
    u = cuda.blockIdx.y * ROWS + cuda.threadIdx.y
    b = cuda.blockIdx.z
    if t >= table[b, PADDED_FRAMES] or u >= table[b, PADDED_ROWS]:
        return
    lane = cuda.threadIdx.x
    U1 = table[b, LABELS] + 1
    start = _first_logit(table, b, t, u)
    inside = t < table[b, FRAMES] and u < U1
    label = blank
    z = posterior = at_blank = at_label = ZERO
    if inside:
        node = table[b, FIRST_NODE] + t * U1 + u
        z = log_z[node]
        at_blank = -blank_posterior[node]
        at_label = -label_posterior[node]
        if fused:
            posterior = blank_posterior[node] + label_posterior[node]
        if u + 1 < U1:
            label = targets[b, u]
    if posterior != ZERO:
        # `out` may be `logits`, but a lane overwrites only the tokens that it owns. The result for
        # a token that it does not own is not used.
        at_blank += posterior * exp(_load(logits, start + blank) - z)
        at_label += posterior * exp(_load(logits, start + label) - z)
        posterior *= incoming[b]
    end = AT(start + V)
    at = _softmax(logits, out, AT(start + lane), end, EACH, z, posterior)
    _softmax(logits, out, at, end, 1, z, posterior)
    if inside and lane == label % LANES:
        _store(out, start + label, at_label * incoming[b])
    if inside and lane == blank % LANES:
        _store(out, start + blank, at_blank * incoming[b])


@cuda.jit
def _sweep(table, blank_logp, label_logp, sums):
    """Write log beta(t, u) into row 0 of `sums`, and log alpha(t, u) into row 1.

    Row 1 takes the same steps through the lattice turned by 180 degrees.
    """
    row = cuda.blockIdx.x
    b = cuda.blockIdx.z
    forward = row == 1
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    start = table[b, FIRST_NODE]
    back = -1  # towards the nodes that are finished
    if not forward:
        start += T * U1 - 1
        back = 1
    for k in range(T + U1 - 1):
        for u in range(max(0, k - T + 1) + cuda.threadIdx.y, min(k + 1, U1), cuda.blockDim.y):
            node = start - back * ((k - u) * U1 + u)
            x = -inf
            if k == 0:
                x = 0.0 if forward else np.float64(blank_logp[node])
            if u < k:
                other = node + back * U1
                x = sums[row, other] + blank_logp[other if forward else node]
            if u > 0:
                other = node + back
                x = _log_add(x, sums[row, other] + label_logp[other if forward else node])
            sums[row, node] = x
        cuda.syncthreads()  # the next diagonal reads what other threads wrote


@cuda.jit
def _posteriors(
    table, blank_logp, label_logp, sums, label_factor, blank_posterior, label_posterior
):
    t = cuda.blockIdx.x
    u = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    b = cuda.blockIdx.z
    U1 = table[b, LABELS] + 1
    frames_left = table[b, FRAMES] - t - 1
    if frames_left < 0 or u >= U1:
        return
    first = table[b, FIRST_NODE]
    node = first + t * U1 + u
    # an utterance without a path gets posteriors of 0 instead of 0 / 0
    total = sums[0, first] if sums[0, first] != -inf else 0.0
    alpha = sums[1, node] - total
    after_blank = 0.0 if u + 1 == U1 else -inf
    if frames_left > 0:
        after_blank = sums[0, node + U1]
    blank_posterior[node] = math.exp(alpha + blank_logp[node] + after_blank)
    label_posterior[node] = ZERO
    if u + 1 < U1:
        posterior = math.exp(alpha + label_logp[node] + sums[0, node + 1])
        label_posterior[node] = posterior * label_factor
