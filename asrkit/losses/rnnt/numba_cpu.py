"""The transducer's lattice compiled for the CPU: the reference's two recursions, one utterance a
thread, in float64.
"""

from math import exp, inf, log1p

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
from asrkit.losses.simd import kernel


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return kernel_loss(logits, targets, nodes, options, numba_cpu, lattice)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Memory: 8 bytes a node for the backward variables, 8 for both posteriors. Of `options` it reads
    fastemit_lambda.
    """
    logps = (arcs.blank_logp.numpy(), arcs.label_logp.numpy(), nodes.table.numpy())
    beta, log_likelihood = empty_sums(nodes)
    posteriors = 0
    if grad:
        posteriors = nodes.count
    blank_posterior = arcs.blank_logp.new_empty(posteriors)
    label_posterior = torch.empty_like(blank_posterior)
    with numba_cpu.pool():
        _backward_variables(*logps, beta.numpy(), log_likelihood.numpy())
        if not grad:
            return ArcPosteriors(log_likelihood)
        _posteriors(
            *logps,
            beta.numpy(),
            blank_posterior.numpy(),
            label_posterior.numpy(),
            1 + options.fastemit_lambda,
        )
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior)


def empty_sums(nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Room for backward variables (N,) and log-likelihoods (B,), in float64."""
    beta = torch.empty(nodes.count, dtype=torch.float64, device="cpu")
    return beta, torch.empty(len(nodes.table), dtype=torch.float64, device="cpu")


@njit(inline="always")
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


@kernel
def _backward_variables(blank_logp, label_logp, table, beta, log_likelihood):
    """log beta(t, u): probability of all paths from (t, u) to the end."""
    for b in prange(table.shape[0]):
        T = table[b, FRAMES]
        U = table[b, LABELS]
        first = table[b, FIRST_NODE]
        for t in range(T - 1, -1, -1):
            for u in range(U, -1, -1):
                node = first + t * (U + 1) + u
                if t + 1 < T:
                    total = beta[node + U + 1] + blank_logp[node]
                elif u == U:
                    total = np.float64(blank_logp[node])
                else:
                    total = -inf
                if u < U:
                    total = log_add(total, beta[node + 1] + label_logp[node])
                beta[node] = total
        log_likelihood[b] = beta[first]


@kernel
def _posteriors(
    blank_logp, label_logp, table, beta, blank_posterior, label_posterior, label_factor
):
    """Posteriors of the arcs, frame by frame, with the forward variables of that frame only."""
    for b in prange(table.shape[0]):
        T = table[b, FRAMES]
        U = table[b, LABELS]
        first = table[b, FIRST_NODE]
        alpha = np.full(U + 1, -inf)  # minus the log-likelihood, of frame t
        # an utterance without any path gets posteriors of 0 rather than 0 / 0
        alpha[0] = -max(beta[first], -1e300)
        for t in range(T):
            for u in range(U + 1):
                node = first + t * (U + 1) + u
                if u > 0:
                    by_label = alpha[u - 1] + label_logp[node - 1]
                    if t > 0:
                        by_label = log_add(alpha[u], by_label)
                    alpha[u] = by_label
                after_blank = -inf
                if t + 1 < T:
                    after_blank = beta[node + U + 1]
                elif u == U:
                    after_blank = 0.0
                blank_posterior[node] = exp(alpha[u] + blank_logp[node] + after_blank)
                posterior = 0.0
                if u < U:
                    posterior = exp(alpha[u] + label_logp[node] + beta[node + 1]) * label_factor
                label_posterior[node] = posterior
            for u in range(U + 1):
                alpha[u] += blank_logp[first + t * (U + 1) + u]
