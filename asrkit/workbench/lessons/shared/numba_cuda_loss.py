"""The transducer loss with its lattice in a CUDA kernel of Numba, as notebook 03 explains it.

The lattice is computed by anti-diagonals, forward and backward variables at the same time. A block
computes one direction of one utterance with T + U1 - 1 barriers. Its threads share the nodes of a
diagonal, and shared memory holds the last two diagonals. Sums are float64: a diagonal waits for
memory and barriers rather than for arithmetic, and float32 would lose digits that the other
implementations keep. Memory: 16 bytes per node for both sums, 8 for both posteriors.

The passes over the logits are torch's (`asrkit.losses.wavefront`). The records of `numba_cuda`
timed passes in Numba, which were slower than Triton's and have been removed.
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
# Numba warns of small grids, but there is only one block of work per lattice and direction.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
WARP = 32  # threads that run together
BLOCKS = 4096  # most blocks per utterance; each takes several nodes in strides
THREADS = 256  # most threads of a block
WIDEST = 3072  # two diagonals of float64 fit into the 48 KiB of shared memory of every device


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
        logits: (B, T, U1, V), float32, float16 or bfloat16, on a GPU; on a CPU with Numba's
            simulator (environment variable NUMBA_ENABLE_CUDASIM=1).
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

    If torch frees memory before the kernel has run, it reuses that memory on the same stream only,
    so for work that runs after the kernel. With Numba's simulator the tensors are on the CPU.

    Args:
        kernel: a function of cuda.jit.
        blocks: size of the grid.
        threads: threads per block.
        arguments: tensors; they are not copied.
        shared: bytes of dynamic shared memory.
    """
    if SIMULATED:
        kernel[blocks, threads, 0, shared](*(tensor.numpy() for tensor in arguments))
        return
    index = arguments[0].device.index
    with cuda.gpus[index]:
        arrays = [cuda.as_cuda_array(tensor, sync=False) for tensor in arguments]
        stream = cuda.external_stream(torch.cuda.current_stream(index).cuda_stream)
        kernel[blocks, threads, stream, shared](*arrays)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the arcs.

    Arcs are float32, sums float64.
    """
    _, U1 = nodes.longest
    directions = 2 if grad else 1  # backward variables and, with `grad`, forward variables
    sums = arcs.log_z.new_empty((directions, nodes.count), dtype=torch.float64)
    log_likelihood = sums.new_empty(len(nodes.table))
    inputs = (arcs.blank_logp, arcs.label_logp, nodes.on(sums.device), sums)
    warps = (U1 + WARP - 1) // WARP
    threads = min(THREADS, warps * WARP)
    blocks = (len(log_likelihood), directions)
    launch(_sweep, blocks, threads, *inputs, log_likelihood, shared=16 * U1)
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    blocks_each = min(-(-int(nodes.sizes.max()) // THREADS), BLOCKS)
    grid = (blocks_each, len(nodes.sizes))
    launch(_posteriors, grid, THREADS, *inputs, blank_posterior, label_posterior)
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior, arcs.duration_logp)


@cuda.jit(device=True)
def log_add(a, b):
    """log(exp(a) + exp(b)), also for terms whose exp() would underflow."""
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
    """Write log beta(t, u) into row 0 of `sums`, and log alpha(t, u) into row 1 by the same steps
    through the lattice rotated by 180 degrees.
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
            # source nodes of the two arcs into this one, in the sweep's direction
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
    # an utterance without a path gets posteriors of 0 instead of 0 / 0
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
