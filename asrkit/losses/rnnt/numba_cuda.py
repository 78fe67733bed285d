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
    wanted = f"at most {WIDEST - 1} labels with numba_cuda's lattice"
    expect(U1 <= WIDEST, "target_lengths", wanted, U1 - 1, "Pass impl='auto'.")
    sums, log_likelihood = empty_sums(arcs, nodes, grad)
    lattice_tensors = (arcs.blank_logp, arcs.label_logp, nodes.on(sums.device), sums)
    blocks = (len(log_likelihood), len(sums))
    launch(_sweep, blocks, threads_for(U1), *lattice_tensors, log_likelihood, shared=16 * U1)
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    posteriors = (blank_posterior, label_posterior)
    blocks = blocks_for(nodes, nodes.sizes, LANES)
    launch(_posteriors, blocks, LANES, *lattice_tensors, 1.0 + options.fastemit_lambda, *posteriors)
    return ArcPosteriors(log_likelihood, *posteriors)


def empty_sums(arcs: ArcLogProbs, nodes: Nodes, grad: bool) -> tuple[Tensor, Tensor]:
    """Room for the sums of the `nodes` and for log-likelihoods (B,), in float64, beside the `arcs`.

    Sums are backward variables and, with `grad`, forward variables: (1 or 2, N).
    """
    device = arcs.blank_logp.device
    sums = torch.empty((2 if grad else 1, nodes.count), dtype=torch.float64, device=device)
    return sums, torch.empty(len(nodes.table), dtype=torch.float64, device=device)


def threads_for(U1: int) -> int:
    """Threads of a block for diagonals of at most U1 nodes: whole warps, at most LANES."""
    return min(LANES, -(-U1 // 32) * 32)


@cuda.jit(device=True)
def log_add(a, b):
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    if a < b:
        a, b = b, a
    return a if b == -inf else a + log1p(exp(b - a))


@cuda.jit
def _sweep(blank_logp, label_logp, table, sums, log_likelihood):
    """log beta(t, u) in row 0 of `sums`; log alpha(t, u) in row 1, by the same steps through the
    lattice turned by 180 degrees.
    """
    b = cuda.blockIdx.x
    forward = cuda.blockIdx.y == 1
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    first = table[b, FIRST_NODE]
    last = first + T * U1 - 1
    diagonals = cuda.shared.array(0, types.float64)
    for k in range(T + U1 - 1):
        here = k % 2 * U1
        before = (k + 1) % 2 * U1
        for u in range(max(0, k - T + 1) + cuda.threadIdx.x, min(k + 1, U1), cuda.blockDim.x):
            place = (k - u) * U1 + u
            node = first + place if forward else last - place
            x = -inf
            if k == 0:
                x = 0.0 if forward else np.float64(blank_logp[last])
            if u < k:
                x = diagonals[before + u] + blank_logp[node - U1 if forward else node]
            if u > 0:
                label = label_logp[node - 1 if forward else node]
                x = log_add(x, diagonals[before + u - 1] + label)
            diagonals[here + u] = x
            sums[cuda.blockIdx.y, node] = x
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
    total = sums[0, first] if sums[0, first] != -inf else 0.0
    for place in range(cuda.grid(2)[0], size, cuda.gridsize(2)[0]):
        node = first + place
        u = place % U1
        alpha = sums[1, node] - total
        after_blank = -inf
        if place + U1 < size:
            after_blank = sums[0, node + U1]
        elif u + 1 == U1:
            after_blank = 0.0
        blank_posterior[node] = exp(alpha + blank_logp[node] + after_blank)
        posterior = 0.0
        if u + 1 < U1:
            posterior = exp(alpha + label_logp[node] + sums[0, node + 1]) * label_factor
        label_posterior[node] = posterior
