"""The transducer's lattice compiled for the CPU: the reference's two recursions, one utterance a
thread, in float64.
"""

from math import exp, inf, log1p

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from asrkit.losses.gradient import lattice_loss
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
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    return lattice_loss(logits, targets, nodes.of(logits), options, numba_cpu, lattice)


def lattice(
    scores: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """Log-likelihoods and shares. Memory: 8 bytes a node for the backward variables, 8 for both
    shares.
    """
    arcs = scores.blank_logp.numpy(), scores.label_logp.numpy(), nodes.table.numpy()
    beta, total = (
        torch.empty(size, dtype=torch.float64, device="cpu")
        for size in (nodes.count, len(nodes.table))
    )
    blank_posterior, label_posterior = scores.blank_logp.new_empty(
        (2, nodes.count if grad else 0)
    ).unbind()
    with numba_cpu.pool():
        _backward(*arcs, beta.numpy(), total.numpy())
        if not grad:
            return ArcPosteriors(total)
        _shares(
            *arcs,
            beta.numpy(),
            blank_posterior.numpy(),
            label_posterior.numpy(),
            1 + options.fastemit_lambda,
        )
    return ArcPosteriors(total, blank_posterior, label_posterior)


@njit(inline="always")
def log_add(a, b):
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    if a < b:
        a, b = b, a
    return a if b == -inf else a + log1p(exp(b - a))


@kernel
def _backward(stay, emit, table, beta, total):
    """log beta(t, u): probability of all ways from (t, u) to the end."""
    for b in prange(table.shape[0]):
        T, U, first = table[b, FRAMES], table[b, LABELS], table[b, FIRST_NODE]
        for t in range(T - 1, -1, -1):
            for u in range(U, -1, -1):
                node = first + t * (U + 1) + u
                if t + 1 < T:
                    here = beta[node + U + 1] + stay[node]
                else:
                    here = np.float64(stay[node]) if u == U else -inf
                beta[node] = log_add(here, beta[node + 1] + emit[node]) if u < U else here
        total[b] = beta[first]


@kernel
def _shares(stay, emit, table, beta, blank_posterior, label_posterior, label_factor):
    """Shares of the arcs, row by row, beside the forward variables alpha(t, u) of that row alone."""
    for b in prange(table.shape[0]):
        T, U, first = table[b, FRAMES], table[b, LABELS], table[b, FIRST_NODE]
        total = max(beta[first], -1e300)  # no path at all has no share, rather than 0 / 0
        alpha = np.full(U + 1, -inf)
        alpha[0] = -total
        for t in range(T):
            for u in range(U + 1):
                node = first + t * (U + 1) + u
                if u > 0:
                    alpha[u] = (
                        log_add(alpha[u], alpha[u - 1] + emit[node - 1])
                        if t > 0
                        else alpha[u - 1] + emit[node - 1]
                    )
                after = beta[node + U + 1] if t + 1 < T else 0.0 if u == U else -inf
                blank_posterior[node] = exp(alpha[u] + stay[node] + after)
                label_posterior[node] = (
                    exp(alpha[u] + emit[node] + beta[node + 1]) * label_factor if u < U else 0.0
                )
            for u in range(U + 1):
                alpha[u] += stay[first + t * (U + 1) + u]
