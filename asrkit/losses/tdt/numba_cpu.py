"""TDT's lattice compiled for the CPU: one utterance a thread, in float64.

Posteriors need no forward variables. A node's own posterior, 1 at the first node, is passed on
along its arcs: an arc takes the part arc beta(t', u') / beta(t, u) of it to the node (t', u') where
it lands.
"""

from math import exp, inf

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from asrkit.losses.gradient import kernel_loss
from asrkit.losses.logit_rows import numba_cpu
from asrkit.losses.nodes import (
    FIRST_NODE,
    FRAMES,
    LABELS,
    ArcLogProbs,
    ArcPosteriors,
    LatticeOptions,
    Nodes,
)
from asrkit.losses.rnnt.numba_cpu import empty_sums, log_add
from asrkit.losses.simd import kernel


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return kernel_loss(logits, targets, nodes, options, numba_cpu, lattice)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Memory: 16 bytes a node for backward variables and node posteriors, 8 + 4 n for the result. Of
    `options` it reads durations and fastemit_lambda.
    """
    assert arcs.duration_logp is not None
    lattice_arrays = (
        arcs.blank_logp.numpy(),
        arcs.label_logp.numpy(),
        arcs.duration_logp.numpy(),
        np.array([min(d, 2**31) for d in options.durations]),
        nodes.table.numpy(),
    )
    beta, log_likelihood = empty_sums(nodes)
    with numba_cpu.pool():
        _backward_variables(*lattice_arrays, beta.numpy(), log_likelihood.numpy())
        if not grad:
            return ArcPosteriors(log_likelihood)
        blank_posterior = torch.zeros_like(arcs.blank_logp)
        label_posterior = torch.zeros_like(arcs.blank_logp)
        duration_posterior = torch.zeros_like(arcs.duration_logp)
        _posteriors(
            *lattice_arrays,
            beta.numpy(),
            torch.zeros_like(beta).numpy(),
            blank_posterior.numpy(),
            label_posterior.numpy(),
            duration_posterior.numpy(),
            1 + options.fastemit_lambda,
        )
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior, duration_posterior)


@njit(inline="always")
def _after(beta, node, t, u, d, T, U):
    """log beta where blank of duration d leads, and where a label does; -inf if nowhere."""
    blank = -inf
    label = -inf
    there = node + d * (U + 1)
    if t + d < T:
        if d > 0:
            blank = beta[there]
        if u < U:
            label = beta[there + 1]
    elif t + d == T and u == U:
        blank = 0.0
    return blank, label


@kernel
def _backward_variables(
    blank_logp, label_logp, duration_logp, durations, table, beta, log_likelihood
):
    """log beta(t, u): probability of all paths from (t, u) to the end."""
    for b in prange(table.shape[0]):
        T = table[b, FRAMES]
        U = table[b, LABELS]
        first = table[b, FIRST_NODE]
        for t in range(T - 1, -1, -1):
            for u in range(U, -1, -1):
                node = first + t * (U + 1) + u
                total = -inf
                for i in range(durations.shape[0]):
                    blank, label = _after(beta, node, t, u, durations[i], T, U)
                    tokens = log_add(blank_logp[node] + blank, label_logp[node] + label)
                    total = log_add(total, tokens + duration_logp[node, i])
                beta[node] = total
        log_likelihood[b] = beta[first]


@kernel
def _posteriors(
    blank_logp,
    label_logp,
    duration_logp,
    durations,
    table,
    beta,
    node_posterior,
    blank_posterior,
    label_posterior,
    duration_posterior,
    label_factor,
):
    """Posteriors of the arcs, and of the nodes they lead to, in the order of the paths."""
    for b in prange(table.shape[0]):
        T = table[b, FRAMES]
        U = table[b, LABELS]
        first = table[b, FIRST_NODE]
        node_posterior[first] = 0.0 if beta[first] == -inf else 1.0
        for t in range(T):
            for u in range(U + 1):
                node = first + t * (U + 1) + u
                here = node_posterior[node]
                if here == 0.0:
                    continue
                for i in range(durations.shape[0]):
                    blank, label = _after(beta, node, t, u, durations[i], T, U)
                    rest = duration_logp[node, i] - beta[node]
                    by_blank = here * exp(blank_logp[node] + rest + blank)
                    by_label = here * exp(label_logp[node] + rest + label)
                    if t + durations[i] < T:
                        there = node + durations[i] * (U + 1)
                        node_posterior[there] += by_blank
                        if u < U:
                            node_posterior[there + 1] += by_label
                    blank_posterior[node] += by_blank
                    label_posterior[node] += by_label * label_factor
                    duration_posterior[node, i] += by_blank + by_label * label_factor
