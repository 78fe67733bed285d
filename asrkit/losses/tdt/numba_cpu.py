"""TDT's lattice compiled for the CPU: one utterance a thread, in float64.

Shares need no forward variables: from the share of paths that reach a node, 1 at the first, each
arc takes its own probability of being next, arc beta(t', u') / beta(t, u), to the node where it
lands.
"""

from math import exp, inf

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
from asrkit.losses.rnnt.numba_cpu import log_add
from asrkit.losses.simd import kernel


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    return lattice_loss(logits, targets, nodes.of(logits), options, numba_cpu, lattice)


def lattice(
    scores: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """Log-likelihoods and shares. Memory: 16 bytes a node for backward variables and shares, 8 + 4
    n for the result.
    """
    assert scores.duration_logp is not None
    tail = scores.duration_logp.numpy(), np.array([min(d, 2**31) for d in options.durations])
    arcs = scores.blank_logp.numpy(), scores.label_logp.numpy(), *tail, nodes.table.numpy()
    beta, total = (
        torch.empty(size, dtype=torch.float64, device="cpu")
        for size in (nodes.count, len(nodes.table))
    )
    with numba_cpu.pool():
        _backward(*arcs, beta.numpy(), total.numpy())
        if not grad:
            return ArcPosteriors(total)
        blank_posterior, label_posterior = scores.blank_logp.new_zeros((2, nodes.count)).unbind()
        duration_posterior, share = torch.zeros_like(scores.duration_logp), torch.zeros_like(beta)
        parts = (
            part.numpy() for part in (share, blank_posterior, label_posterior, duration_posterior)
        )
        _shares(*arcs, beta.numpy(), *parts, 1 + options.fastemit_lambda)
    return ArcPosteriors(total, blank_posterior, label_posterior, duration_posterior)


@njit(inline="always")
def _after(beta, node, t, u, d, T, U):
    """log beta where blank of duration d leads, and where a label does; -inf for an arc that is not
    there.
    """
    there = node + d * (U + 1)
    if t + d < T:
        return beta[there] if d > 0 else -inf, beta[there + 1] if u < U else -inf
    return 0.0 if t + d == T and u == U else -inf, -inf


@kernel
def _backward(stay, emit, tail, durations, table, beta, total):
    """log beta(t, u): probability of all ways from (t, u) to the end."""
    for b in prange(table.shape[0]):
        T, U, first = table[b, FRAMES], table[b, LABELS], table[b, FIRST_NODE]
        for t in range(T - 1, -1, -1):
            for u in range(U, -1, -1):
                node = first + t * (U + 1) + u
                here = -inf
                for i in range(durations.shape[0]):
                    blank, label = _after(beta, node, t, u, durations[i], T, U)
                    here = log_add(
                        here, log_add(stay[node] + blank, emit[node] + label) + tail[node, i]
                    )
                beta[node] = here
        total[b] = beta[first]


@kernel
def _shares(
    stay,
    emit,
    tail,
    durations,
    table,
    beta,
    share,
    blank_posterior,
    label_posterior,
    duration_posterior,
    label_factor,
):
    """Shares of the arcs, and of the nodes they lead to, in the order of the paths."""
    for b in prange(table.shape[0]):
        T, U, first = table[b, FRAMES], table[b, LABELS], table[b, FIRST_NODE]
        share[first] = 0.0 if beta[first] == -inf else 1.0
        for t in range(T):
            for u in range(U + 1):
                node = first + t * (U + 1) + u
                if share[node] == 0.0:
                    continue
                for i in range(durations.shape[0]):
                    blank, label = _after(beta, node, t, u, durations[i], T, U)
                    there, here = node + durations[i] * (U + 1), tail[node, i] - beta[node]
                    on, onward = (
                        share[node] * exp(stay[node] + here + blank),
                        share[node] * exp(emit[node] + here + label),
                    )
                    if t + durations[i] < T:
                        share[there] += on
                        if u < U:
                            share[there + 1] += onward
                    blank_posterior[node] += on
                    label_posterior[node] += onward * label_factor
                    duration_posterior[node, i] += on + onward * label_factor
