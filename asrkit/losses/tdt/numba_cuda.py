"""TDT's lattice as CUDA kernels: the transducer's wavefront with arcs that reach back over several
diagonals.

An arc of duration d comes d diagonals down, or d + 1 for a label, so no two nodes of a diagonal
depend on each other. What lies further back than shared memory would hold is read from the sums
themselves: after a barrier a block sees what it wrote. Sums are float64, for the reason that
asrkit.losses.rnnt.numba_cuda gives. Memory: 16 bytes a node for the sums, 4 (n + 2) for the shares.
"""

from math import exp, inf

import torch
from numba import cuda
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
from asrkit.losses.rnnt.numba_cuda import LANES, empty_sums, log_add


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    return lattice_loss(logits, targets, nodes.of(logits), options, numba_cuda, lattice)


def lattice(
    scores: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """Log-likelihoods and shares; arcs float32, sums float64."""
    assert scores.duration_logp is not None
    sums, total = empty_sums(scores, nodes, grad)
    U1, device = int(nodes.table[:, LABELS].max()) + 1, total.device
    arcs = (
        scores.blank_logp,
        scores.label_logp,
        scores.duration_logp,
        nodes.on(device),
        options.durations,
        sums,
    )
    launch(_sweep, (len(total), len(sums)), min(LANES, -(-U1 // 32) * 32), *arcs, total)
    if not grad:
        return ArcPosteriors(total)
    blank_posterior, label_posterior, duration_posterior = (
        torch.empty_like(part)
        for part in (scores.blank_logp, scores.label_logp, scores.duration_logp)
    )
    size = nodes.table[:, FRAMES] * (nodes.table[:, LABELS] + 1)
    factor = 1.0 + options.fastemit_lambda
    launch(
        _shares,
        blocks_for(nodes, size, LANES),
        LANES,
        *arcs,
        factor,
        blank_posterior,
        label_posterior,
        duration_posterior,
    )
    return ArcPosteriors(total, blank_posterior, label_posterior, duration_posterior)


@cuda.jit
def _sweep(stay, emit, duration, table, durations, sums, total):
    """log beta(t, u) in row 0 of `sums`; in row 1 log alpha(t, u), by the same steps through the
    lattice turned about.
    """
    b, row = cuda.blockIdx.x, cuda.blockIdx.y
    T, U1, first = table[b, FRAMES], table[b, LABELS] + 1, table[b, FIRST_NODE]
    last, sign = first + T * U1 - 1, 1 - 2 * row  # backward sums come from later nodes
    for k in range(T + U1 - 1):
        for u in range(max(0, k - T + 1) + cuda.threadIdx.x, min(k + 1, U1), cuda.blockDim.x):
            t = k - u
            node = first + t * U1 + u if row == 1 else last - t * U1 - u
            x = 0.0 if k == 0 and row == 1 else -inf
            for i in range(len(durations)):
                d = durations[i]
                if 0 < d <= t:
                    other = node + sign * d * U1
                    arc = other if row == 1 else node
                    x = log_add(x, sums[row, other] + stay[arc] + duration[arc, i])
                if d <= t and u > 0:
                    other = node + sign * (d * U1 + 1)
                    arc = other if row == 1 else node
                    x = log_add(x, sums[row, other] + emit[arc] + duration[arc, i])
                if d == t + 1 and u == 0 and row == 0:  # the blank that ends the path
                    x = log_add(x, stay[node] + duration[node, i])
            sums[row, node] = x
        cuda.syncthreads()
    if cuda.threadIdx.x == 0 and row == 0:
        total[b] = sums[0, first]


@cuda.jit
def _shares(
    stay,
    emit,
    duration,
    table,
    durations,
    sums,
    label_factor,
    blank_posterior,
    label_posterior,
    duration_posterior,
):
    b = cuda.blockIdx.y
    T, U1, first = table[b, FRAMES], table[b, LABELS] + 1, table[b, FIRST_NODE]
    total = (
        sums[0, first] if sums[0, first] != -inf else 0.0
    )  # no path at all has no share, rather than 0 / 0
    for place in range(cuda.grid(2)[0], T * U1, cuda.gridsize(2)[0]):
        t, u, node = place // U1, place % U1, first + place
        blanks = labels = 0.0
        for i in range(len(durations)):
            d = durations[i]
            here = sums[1, node] + duration[node, i] - total
            blank = label = 0.0
            if d > 0 and t + d < T:
                blank = exp(here + stay[node] + sums[0, node + d * U1])
            elif t + d == T and u + 1 == U1:
                blank = exp(here + stay[node])
            if t + d < T and u + 1 < U1:
                label = exp(here + emit[node] + sums[0, node + d * U1 + 1]) * label_factor
            duration_posterior[node, i] = blank + label
            blanks += blank
            labels += label
        blank_posterior[node] = blanks
        label_posterior[node] = labels
