"""The transducer's lattice as CUDA kernels: anti-diagonal after anti-diagonal, forward and backward
at the same time.

A block takes one direction of one utterance, T + U1 - 1 barriers long; its threads share out a
diagonal, of which shared memory holds the latest two. Sums are float64: a diagonal waits for memory
and barriers rather than for arithmetic, and float32 would lose what the other implementations keep.
Memory: 16 bytes a node for both sums, 8 for both shares.
"""

from math import exp, inf, log1p

import numpy as np
import torch
from numba import cuda, types
from torch import Tensor

from asrkit.losses.gradient import lattice_loss
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
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    return lattice_loss(logits, targets, nodes.of(logits), options, numba_cuda, lattice)


def lattice(
    scores: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """Log-likelihoods and shares; arcs float32, sums float64."""
    U1, remedy = int(nodes.table[:, LABELS].max()) + 1, "Pass impl='auto'."
    expect(
        U1 <= WIDEST,
        "target_lengths",
        f"at most {WIDEST - 1} labels with numba_cuda's lattice",
        U1 - 1,
        remedy,
    )
    sums, total = empty_sums(scores, nodes, grad)
    arcs = scores.blank_logp, scores.label_logp, nodes.on(total.device), sums
    launch(
        _sweep, (len(total), len(sums)), min(LANES, -(-U1 // 32) * 32), *arcs, total, shared=16 * U1
    )
    if not grad:
        return ArcPosteriors(total)
    blank_posterior, label_posterior = (
        torch.empty_like(scores.blank_logp),
        torch.empty_like(scores.blank_logp),
    )
    size = nodes.table[:, FRAMES] * (nodes.table[:, LABELS] + 1)
    launch(
        _shares,
        blocks_for(nodes, size, LANES),
        LANES,
        *arcs,
        1.0 + options.fastemit_lambda,
        blank_posterior,
        label_posterior,
    )
    return ArcPosteriors(total, blank_posterior, label_posterior)


def empty_sums(scores: ArcLogProbs, nodes: Nodes, grad: bool) -> tuple[Tensor, Tensor]:
    """Room for backward and, with `grad`, forward variables, (1 or 2, N), and for log-likelihoods
    (B,), in float64.
    """
    device = scores.blank_logp.device
    sums = torch.empty((2 if grad else 1, nodes.count), dtype=torch.float64, device=device)
    return sums, torch.empty(len(nodes.table), dtype=torch.float64, device=device)


@cuda.jit(device=True)
def log_add(a, b):
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    if a < b:
        a, b = b, a
    return a if b == -inf else a + log1p(exp(b - a))


@cuda.jit
def _sweep(stay, emit, table, sums, total):
    """log beta(t, u) in row 0 of `sums`; in row 1 log alpha(t, u), by the same steps through the
    lattice turned about.
    """
    b, forward = cuda.blockIdx.x, cuda.blockIdx.y == 1
    T, U1, first = table[b, FRAMES], table[b, LABELS] + 1, table[b, FIRST_NODE]
    last = first + T * U1 - 1
    diagonals = cuda.shared.array(0, types.float64)
    for k in range(T + U1 - 1):
        here, before = k % 2 * U1, (k + 1) % 2 * U1
        for u in range(max(0, k - T + 1) + cuda.threadIdx.x, min(k + 1, U1), cuda.blockDim.x):
            place = (k - u) * U1 + u
            node = first + place if forward else last - place
            x = -inf
            if k == 0:
                x = 0.0 if forward else np.float64(stay[last])
            if u < k:
                x = diagonals[before + u] + stay[node - U1 if forward else node]
            if u > 0:
                x = log_add(x, diagonals[before + u - 1] + emit[node - 1 if forward else node])
            diagonals[here + u] = x
            sums[cuda.blockIdx.y, node] = x
        cuda.syncthreads()
    if cuda.threadIdx.x == 0 and not forward:
        total[b] = sums[0, first]


@cuda.jit
def _shares(stay, emit, table, sums, label_factor, blank_posterior, label_posterior):
    b = cuda.blockIdx.y
    U1, first = table[b, LABELS] + 1, table[b, FIRST_NODE]
    size = table[b, FRAMES] * U1
    total = (
        sums[0, first] if sums[0, first] != -inf else 0.0
    )  # no path at all has no share, rather than 0 / 0
    for place in range(cuda.grid(2)[0], size, cuda.gridsize(2)[0]):
        node, u = first + place, place % U1
        alpha = sums[1, node] - total
        after = sums[0, node + U1] if place + U1 < size else 0.0 if u + 1 == U1 else -inf
        blank_posterior[node] = exp(alpha + stay[node] + after)
        label_posterior[node] = (
            exp(alpha + emit[node] + sums[0, node + 1]) * label_factor if u + 1 < U1 else 0.0
        )
