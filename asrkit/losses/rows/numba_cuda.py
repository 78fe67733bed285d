"""Both passes over the logits as CUDA kernels: log-softmax fused with the scores, softmax with the gradient.

A block takes a lattice node, its threads share out the tokens, so neighbours read side by side. Floor: the logits are read
twice and the gradient is written once, 3 x 4 B T U1 V bytes in float32, half of that in half precision. Sums over tokens
and exp are float32; the log-normaliser adds a float64 logarithm. bfloat16 comes as bit patterns, since NumPy has none.
"""

from math import copysign, exp, inf, log

import numpy as np
import torch
from numba import cuda, types
from numba.cuda.core import config
from torch import Tensor

from asrkit.losses.autograd import Saved
from asrkit.losses.availability import SIMULATED
from asrkit.losses.nodes import (
    FIRST_LOGIT,
    FIRST_NODE,
    FRAME_STEP,
    FRAMES,
    LABEL_STEP,
    LABELS,
    ROW_FRAMES,
    ROW_NODES,
    Nodes,
    Options,
    Scores,
)  # fmt: skip
from asrkit.losses.rows.numba_cpu import flat

config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # one block for each lattice is all the work there is, and no mistake
THREADS = 128  # of a block at most, a power of two
BLOCKS = 4096  # for each utterance at most; they go on to further nodes in strides
F = np.float32
LOWEST = np.finfo(F).min


def launch(kernel, blocks: tuple[int, int], threads: int, *arguments, shared: int = 0) -> None:
    """Queue `kernel` on torch's current stream; a tensor among the arguments (the first is one) is seen as it is, uncopied.

    Nobody waits. Memory that torch frees before the kernel has run is given out again on the same stream only, hence to
    work that is queued behind the kernel. In Numba's simulator the tensors are the CPU's.
    """
    given = as_bits(arguments)
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        kernel[blocks, threads, 0, shared](*(FakeCUDAArray(a.numpy()) if isinstance(a, Tensor) else a for a in given))
        return
    index = given[0].device.index
    with cuda.gpus[index]:
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        arrays = [cuda.as_cuda_array(a, sync=False) if isinstance(a, Tensor) else a for a in given]
        kernel[blocks, threads, stream, shared](*arrays)


def as_bits(arguments: tuple) -> list:
    """The arguments with tensors detached, bfloat16 as bit patterns: uint16."""
    given = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    return [a.view(torch.uint16) if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a for a in given]


def blocks_for(nodes: Nodes, size: Tensor, each: int = 1) -> tuple[int, int]:
    """Grid for `size` (B,) pieces of work in each utterance, of which a block takes `each` at a time."""
    return min(-(-int(size.max()) // each), BLOCKS), len(nodes.table)


def scores(logits: Tensor, targets: Tensor, nodes: Nodes, options: Options) -> Scores:
    """Scores of all nodes, (N,) each, float32."""
    n, device = len(options.durations), logits.device
    z, stay, emit = torch.empty((3, nodes.count), device=device).unbind()
    durations = torch.empty((nodes.count, n), device=device)
    V, blocks = logits.shape[-1] - n, blocks_for(nodes, nodes.table[:, FRAMES] * (nodes.table[:, LABELS] + 1))
    threads = _threads(V)
    launch(_scores, blocks, threads, flat(logits), targets.contiguous(), nodes.on(device), V, options.blank,
           options.fused_log_softmax, z, stay, emit, durations, shared=8 * threads)  # fmt: skip
    return Scores(z, stay, emit, durations if n else None)


def gradient(logits: Tensor, out: Tensor, targets: Tensor, nodes: Nodes, options: Options, saved: Saved, incoming: Tensor) -> None:
    """Write the gradient over all of `out`; see asrkit.losses.autograd.Rows."""
    tail = saved.z.new_empty((len(saved.z), 0)) if saved.by_duration is None else saved.by_duration
    V, clamp = logits.shape[-1] - tail.shape[1], F(options.clamp if options.clamp > 0 else inf)
    own = nodes if out.stride() == logits.stride() else nodes.of(out)
    tables = nodes.on(logits.device), own.on(logits.device)
    launch(_gradient, blocks_for(nodes, nodes.table[:, ROW_FRAMES] * nodes.table[:, ROW_NODES]), _threads(V), flat(logits),
           flat(out), targets.contiguous(), *tables, V, options.blank, options.fused_log_softmax, clamp, saved.z,
           saved.by_blank, saved.by_label, tail, incoming.float().contiguous())  # fmt: skip


def _threads(V: int) -> int:
    return min(THREADS, 1 << max(5, (V - 1).bit_length()))


@cuda.jit(device=True)
def _load(x):
    """A logit as float32. The compiler knows the answer of isinstance, so each type has kernels of its own."""
    return np.uint32(np.uint32(x) << 16).view(F) if isinstance(x, np.uint16) else F(x)


@cuda.jit(device=True)
def _store(out, at, x):
    """Write a float32, rounded to the nearest value of the array's type, ties to even; NaN stays NaN."""
    if isinstance(out[at], np.uint16):
        u = F(x).view(np.uint32)
        out[at] = (u + 0x7FFF + ((u >> 16) & 1)) >> 16 if x == x else 0x7FC0
    else:
        out[at] = x


@cuda.jit(device=True)
def _normaliser(x, start, size):
    """log of the sum of exp over a row, in float64, for the block's first thread; NaN where the row holds one."""
    i, threads = cuda.threadIdx.x, cuda.blockDim.x
    largest, total = LOWEST, F(0.0)
    for v in range(start + i, start + size, threads):
        largest = max(largest, _load(x[v]))
    for v in range(start + i, start + size, threads):
        total += F(exp(_load(x[v]) - largest))
    parts = cuda.shared.array(0, types.float32)  # maxima of the threads, then their sums
    cuda.syncthreads()  # the row before may still be read
    parts[i] = largest
    parts[threads + i] = total
    half = threads // 2
    while half > 0:
        cuda.syncthreads()
        if i < half:
            a, b = parts[i], parts[i + half]
            above = max(a, b)
            parts[threads + i] = parts[threads + i] * F(exp(a - above)) + parts[threads + i + half] * F(exp(b - above))
            parts[i] = above
        half //= 2
    return np.float64(parts[0]) + log(np.float64(parts[threads])) if i == 0 else 0.0


@cuda.jit
def _scores(logits, targets, table, V, blank, fused, z, stay, emit, durations):
    b, n = cuda.blockIdx.y, durations.shape[1]
    U1 = table[b, LABELS] + 1
    for place in range(cuda.blockIdx.x, table[b, FRAMES] * U1, cuda.gridDim.x):
        u, node = place % U1, table[b, FIRST_NODE] + place
        start = table[b, FIRST_LOGIT] + place // U1 * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]
        here = _normaliser(logits, start, V) if fused else 0.0
        apart = _normaliser(logits, start + V, n) if n > 0 else 0.0
        if cuda.threadIdx.x == 0:
            z[node] = here
            stay[node] = _load(logits[start + blank]) - here
            emit[node] = _load(logits[start + targets[b, u]]) - here if u + 1 < U1 else -inf
            for i in range(n):
                durations[node, i] = _load(logits[start + V + i]) - apart


@cuda.jit
def _gradient(logits, out, targets, table, own, V, blank, fused, clamp, z, by_blank, by_label, by_duration, incoming):
    b, n = cuda.blockIdx.y, by_duration.shape[1]
    T, U1, width = table[b, FRAMES], table[b, LABELS] + 1, table[b, ROW_NODES]
    for place in range(cuda.blockIdx.x, table[b, ROW_FRAMES] * width, cuda.gridDim.x):
        t, u = place // width, place % width
        valid = t < T and u < U1
        node = table[b, FIRST_NODE] + t * U1 + u if valid else 0
        label = targets[b, u] if valid and u + 1 < U1 else -1
        share = by_blank[node] + by_label[node] if fused and valid else F(0.0)
        x = table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]
        g = own[b, FIRST_LOGIT] + t * own[b, FRAME_STEP] + u * own[b, LABEL_STEP]
        for v in range(cuda.threadIdx.x, V + n, cuda.blockDim.x):  # a thread reads no other's logit, so `out` may be `logits`
            grad = F(0.0)
            if valid and v >= V:
                grad = by_duration[node, v - V]
            elif share != F(0.0):
                grad = share * F(exp(_load(logits[x + v]) - z[node]))
            if v == blank and valid:
                grad -= by_blank[node]
            if v == label:
                grad -= by_label[node]
            _store(out, g + v, (F(copysign(clamp, grad)) if abs(grad) > clamp else grad) * incoming[b])
