"""The transducer's lattice as CUDA kernels: anti-diagonal after anti-diagonal, forward and backward
variables at the same time.

A block takes one direction of one utterance, T + U1 - 1 barriers long; its threads share the nodes
of a diagonal, and shared memory holds the latest two diagonals. Sums are float64: a diagonal waits
for memory and barriers rather than for arithmetic, and float32 would lose digits that the other
implementations keep. Memory: 16 bytes a node for both sums, 8 for both posteriors.
"""

from math import exp, inf, log1p

import numpy as np
import torch
from numba import cuda, types
from torch import Tensor

from asrkit.losses.gradient import kernel_loss
from asrkit.losses.logit_rows import numba_cuda
from asrkit.losses.logit_rows.numba_cuda import blocks_for, launch
from asrkit.losses.nodes import (
    FIRST_NODE,
    FRAMES,
    LABELS,
    ArcLogProbs,
    ArcPosteriors,
    LatticeOptions,
    Nodes,
)
from asrkit.shapes import expect

WARP = 32
LANES = 256  # threads of a block at most
WIDEST = 3072  # two diagonals of float64 in the 48 KiB of shared memory that every device has


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return kernel_loss(logits, targets, nodes, options, numba_cuda, lattice)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs are float32, sums float64. Of `options` it reads fastemit_lambda.
    """
    U1 = int(nodes.table[:, LABELS].max()) + 1
    expect(
        U1 <= WIDEST,
        "target_lengths",
        f"at most {WIDEST - 1} labels with numba_cuda's lattice",
        U1 - 1,
        "Pass impl='auto'.",
    )
    sums, log_likelihood = empty_sums(arcs, nodes, grad)
    lattice_tensors = (
        arcs.blank_logp,
        arcs.label_logp,
        nodes.on(sums.device),
        sums,
    )
    blocks = (len(log_likelihood), len(sums))
    launch(_sweep, blocks, threads_for(U1), *lattice_tensors, log_likelihood, shared=16 * U1)
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    launch(
        _posteriors,
        blocks_for(nodes, nodes.sizes, LANES),
        LANES,
        *lattice_tensors,
        1.0 + options.fastemit_lambda,
        blank_posterior,
        label_posterior,
    )
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior)


def empty_sums(arcs: ArcLogProbs, nodes: Nodes, grad: bool) -> tuple[Tensor, Tensor]:
    """Room for the sums of the `nodes` and for log-likelihoods (B,), in float64, beside the `arcs`.

    Sums are backward variables and, with `grad`, forward variables: (1 or 2, N).
    """
    directions = 1
    if grad:
        directions = 2
    device = arcs.blank_logp.device
    sums = torch.empty((directions, nodes.count), dtype=torch.float64, device=device)
    log_likelihood = torch.empty(len(nodes.table), dtype=torch.float64, device=device)
    return sums, log_likelihood


def threads_for(U1: int) -> int:
    """Threads of a block for diagonals of at most U1 nodes: whole warps, at most LANES."""
    warps = (U1 + WARP - 1) // WARP
    return min(LANES, warps * WARP)


@cuda.jit(device=True)
def log_add(a, b):
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    larger = a
    smaller = b
    if a < b:
        larger = b
        smaller = a
    if smaller != -inf:
        larger += log1p(exp(smaller - larger))
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
def _posteriors(
    blank_logp, label_logp, table, sums, label_factor, blank_posterior, label_posterior
):
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
        blank_posterior[node] = exp(log_posterior)
        posterior = 0.0
        if u + 1 < U1:
            log_posterior = alpha + label_logp[node] + sums[0, node + 1]
            posterior = exp(log_posterior) * label_factor
        label_posterior[node] = posterior
