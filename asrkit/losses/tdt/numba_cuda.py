"""TDT's lattice as CUDA kernels: the transducer's wavefront with arcs that reach back over several
diagonals.

An arc of duration d comes d diagonals down, or d + 1 for a label, so no two nodes of a diagonal
depend on each other. Diagonals further back than shared memory would hold are read from the sums
themselves: after a barrier a block sees what it wrote. Sums are float64, for the reason that
asrkit.losses.rnnt.numba_cuda gives. Memory: 16 bytes a node for the sums, 4 (n + 2) for the
posteriors.
"""

from math import exp, inf

import torch
from numba import cuda
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
from asrkit.losses.rnnt.numba_cuda import LANES, empty_sums, log_add, threads_for


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return kernel_loss(logits, targets, nodes, options, numba_cuda, lattice)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs are float32, sums float64. Of `options` it reads durations and fastemit_lambda.
    """
    assert arcs.duration_logp is not None
    sums, log_likelihood = empty_sums(arcs, nodes, grad)
    U1 = int(nodes.table[:, LABELS].max()) + 1
    lattice_tensors = (
        arcs.blank_logp,
        arcs.label_logp,
        arcs.duration_logp,
        nodes.on(sums.device),
        options.durations,
        sums,
    )
    blocks = (len(log_likelihood), len(sums))
    launch(_sweep, blocks, threads_for(U1), *lattice_tensors, log_likelihood)
    if not grad:
        return ArcPosteriors(log_likelihood)
    posteriors = (
        torch.empty_like(arcs.blank_logp),
        torch.empty_like(arcs.label_logp),
        torch.empty_like(arcs.duration_logp),
    )
    launch(
        _posteriors,
        blocks_for(nodes, nodes.sizes, LANES),
        LANES,
        *lattice_tensors,
        1.0 + options.fastemit_lambda,
        *posteriors,
    )
    return ArcPosteriors(log_likelihood, *posteriors)


@cuda.jit
def _sweep(blank_logp, label_logp, duration_logp, table, durations, sums, log_likelihood):
    """log beta(t, u) in row 0 of `sums`; log alpha(t, u) in row 1, by the same steps through the
    lattice turned by 180 degrees.
    """
    b = cuda.blockIdx.x
    row = cuda.blockIdx.y
    T = table[b, FRAMES]
    U1 = table[b, LABELS] + 1
    first = table[b, FIRST_NODE]
    last = first + T * U1 - 1
    sign = 1 - 2 * row  # backward sums come from later nodes
    forward = row == 1
    for k in range(T + U1 - 1):
        least = max(0, k - T + 1)
        end = min(k + 1, U1)
        for u in range(least + cuda.threadIdx.x, end, cuda.blockDim.x):
            t = k - u
            place = t * U1 + u
            x = -inf
            if forward:
                node = first + place
                if k == 0:
                    x = 0.0
            else:
                node = last - place
            for i in range(len(durations)):
                d = durations[i]
                if 0 < d <= t:
                    other = node + sign * d * U1
                    arc = cuda.selp(forward, other, node)  # the node that the arc leaves
                    x = log_add(x, sums[row, other] + blank_logp[arc] + duration_logp[arc, i])
                if d <= t and u > 0:
                    other = node + sign * (d * U1 + 1)
                    arc = cuda.selp(forward, other, node)  # the node that the arc leaves
                    x = log_add(x, sums[row, other] + label_logp[arc] + duration_logp[arc, i])
                if d == t + 1 and u == 0 and not forward:  # the blank that ends the path
                    x = log_add(x, blank_logp[node] + duration_logp[node, i])
            sums[row, node] = x
        cuda.syncthreads()
    if cuda.threadIdx.x == 0 and not forward:
        log_likelihood[b] = sums[0, first]


@cuda.jit
def _posteriors(
    blank_logp,
    label_logp,
    duration_logp,
    table,
    durations,
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
    # an utterance without any path gets posteriors of 0 rather than 0 / 0
    total = sums[0, first]
    if total == -inf:
        total = 0.0
    thread = cuda.grid(2)[0]
    threads = cuda.gridsize(2)[0]
    for place in range(thread, T * U1, threads):
        t = place // U1
        u = place % U1
        node = first + place
        blanks = 0.0
        labels = 0.0
        for i in range(len(durations)):
            d = durations[i]
            here = sums[1, node] + duration_logp[node, i] - total
            blank = 0.0
            if d > 0 and t + d < T:
                blank = exp(here + blank_logp[node] + sums[0, node + d * U1])
            elif t + d == T and u + 1 == U1:
                blank = exp(here + blank_logp[node])
            label = 0.0
            if t + d < T and u + 1 < U1:
                label = exp(here + label_logp[node] + sums[0, node + d * U1 + 1]) * label_factor
            duration_posterior[node, i] = blank + label
            blanks += blank
            labels += label
        blank_posterior[node] = blanks
        label_posterior[node] = labels
