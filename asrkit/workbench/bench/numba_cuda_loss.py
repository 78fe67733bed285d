"""The transducer loss with its lattice in a CUDA kernel of Numba, as notebook 03 explains it.

Lattice: anti-diagonal after anti-diagonal, forward and backward variables at the same time. A block
takes one direction of one utterance, T + U1 - 1 barriers long; its threads share the nodes of a
diagonal, and shared memory holds the latest two diagonals. Sums are float64: a diagonal waits for
memory and barriers rather than for arithmetic, and float32 would lose digits that the other
implementations keep. Memory: 16 bytes a node for both sums, 8 for both posteriors.

The passes over the logits are those of torch, `asrkit.losses.wavefront`. Those of Numba, which the
records of `numba_cuda` timed, were slower than Triton's and have left.
"""

import math
from math import inf, log1p
from typing import Any

import numpy as np
import torch
from numba import cuda, types
from numba.cuda.core import config
from torch import Tensor

from asrkit.losses import wavefront
from asrkit.losses.arguments import Reduction, as_index, check_lengths, reduce
from asrkit.losses.gradient import LatticeLoss
from asrkit.losses.lattice import (
    FIRST_NODE,
    FRAMES,
    LABELS,
    ArcLogProbs,
    ArcPosteriors,
    LatticeOptions,
    Nodes,
)
from asrkit.shapes import dims, expect

SIMULATED = config.ENABLE_CUDASIM
# Numba warns of grids with few blocks, but there is no more work than one block for each lattice.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
WARP = 32  # threads that run together
BLOCKS = 4096  # for each utterance at most; they go on to further nodes in strides
THREADS = 256  # of a block of the lattice, at most
WIDEST = 3072  # two diagonals of float64 in the 48 KiB of shared memory that every device has


def rnnt_loss_numba_cuda(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    reduction: Reduction = "mean",
) -> Tensor:
    """`asrkit.losses.rnnt_loss` with this lattice, in nats; blank is the last token.

    Args:
        logits: (B, T, U1, V), float32, float16 or bfloat16, on a GPU; in Numba's simulator
            (NUMBA_ENABLE_CUDASIM=1 before Python starts) on a CPU.
        targets: labels (B, U), int32 or int64.
        logit_lengths: frames (B,).
        target_lengths: labels (B,).
        reduction: "mean" or "sum" over the batch, or "none".

    Raises:
        ValueError: an argument does not fit.
    """
    _, T, U1, V = dims(logits, "B T U1 V", "logits")
    expect(U1 <= WIDEST, "logits", f"at most U1={WIDEST} lattice rows", U1)
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, -1, like=logits, T=T, U1=U1, V=V
    )
    costs = LatticeLoss.apply(
        logits.contiguous(),
        as_index(targets, logits.device),
        Nodes.padded(logits, lengths),
        LatticeOptions(blank=V - 1),
        wavefront,
        lattice,
    )
    return reduce(costs.float(), reduction)


def launch(
    kernel: Any, blocks: tuple[int, int], threads: int, *arguments: Tensor, shared: int = 0
) -> None:
    """Queue a kernel on torch's current stream, without waiting.

    Memory that torch frees before the kernel has run is given out again on the same stream only,
    hence to work that is queued behind the kernel. In Numba's simulator the tensors are the CPU's.

    Args:
        kernel: from cuda.jit.
        blocks: the grid.
        threads: of a block.
        arguments: tensors, which are not copied.
        shared: bytes of dynamic shared memory.
    """
    if SIMULATED:
        kernel[blocks, threads, 0, shared](*map(_array, arguments))
        return
    index = arguments[0].device.index
    with cuda.gpus[index]:
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        kernel[blocks, threads, stream, shared](*map(_array, arguments))


def _array(value: Tensor) -> Any:
    """A tensor as a CUDA array on the same memory."""
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(value.numpy())
    return cuda.as_cuda_array(value, sync=False)


def blocks_for(sizes: Tensor, each: int) -> tuple[int, int]:
    """The grid for `sizes` (B,) pieces of work, of which a block takes `each` at a time."""
    blocks = (int(sizes.max()) + each - 1) // each
    return min(blocks, BLOCKS), len(sizes)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs are float32, sums float64.
    """
    _, U1 = nodes.longest
    directions = 2 if grad else 1  # backward variables and, with `grad`, forward variables
    sums = arcs.log_z.new_empty((directions, nodes.count), dtype=torch.float64)
    log_likelihood = sums.new_empty(len(nodes.table))
    given = (arcs.blank_logp, arcs.label_logp, nodes.on(sums.device), sums)
    warps = (U1 + WARP - 1) // WARP
    threads = min(THREADS, warps * WARP)
    blocks = (len(log_likelihood), directions)
    launch(_sweep, blocks, threads, *given, log_likelihood, shared=16 * U1)
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    grid = blocks_for(nodes.sizes, THREADS)
    launch(_posteriors, grid, THREADS, *given, blank_posterior, label_posterior)
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior, arcs.duration_logp)


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
