"""The transducer loss as the textbook has it: loops over t and u, one utterance at a time, float64.
Lesson and oracle.

A lattice has a node (t, u) for "frame t is read, u labels are out" and two arcs that leave it:
blank, to (t+1, u), and the next label, to (t, u+1). An alignment is a path from (0, 0) through the
blank that leaves (T-1, U). The likelihood is the sum over all C(T-1+U, U) paths of the products of
their arcs; two recursions sum them in T U1 steps. Below, blank (T, U1) and label (T, U) are nested
lists: the log-probability of the arcs that leave each node, in nats.
Source: A. Graves, "Sequence Transduction with Recurrent Neural Networks", arXiv 1211.3711, sections
2.4 and 2.5.
"""

from collections.abc import Callable
from math import exp, inf, log1p
from typing import Any

import torch
from torch import Tensor

from asrkit.losses.gradient import refuse_second_derivative
from asrkit.losses.nodes import LatticeOptions, Nodes

Lattice = list[list[float]]


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    return b if a == -inf else a if b == -inf else max(a, b) + log1p(exp(-abs(a - b)))


def forward_variables(blank: Lattice, label: Lattice) -> Lattice:
    """log alpha(t, u), (T, U1): probability of all ways from (0, 0) to (t, u).

    alpha(t, u) = alpha(t-1, u) blank(t-1, u) + alpha(t, u-1) label(t, u-1), from alpha(0, 0) = 1.
    """
    alpha = [[-inf for _ in row] for row in blank]
    alpha[0][0] = 0.0
    for t in range(len(alpha)):
        for u in range(len(alpha[0])):
            if t > 0:
                alpha[t][u] = alpha[t - 1][u] + blank[t - 1][u]
            if u > 0:
                alpha[t][u] = log_add(alpha[t][u], alpha[t][u - 1] + label[t][u - 1])
    return alpha


def backward_variables(blank: Lattice, label: Lattice) -> Lattice:
    """log beta(t, u), (T, U1): probability of all ways from (t, u) to the end; beta(0, 0) is the
    likelihood.

    beta(t, u) = beta(t+1, u) blank(t, u) + beta(t, u+1) label(t, u), from beta(T-1, U) = blank(T-1,
    U).
    """
    beta = [[-inf for _ in row] for row in blank]
    beta[-1][-1] = blank[-1][-1]
    for t in reversed(range(len(beta))):
        for u in reversed(range(len(beta[0]))):
            if t + 1 < len(beta):
                beta[t][u] = beta[t + 1][u] + blank[t][u]
            if u + 1 < len(beta[0]):
                beta[t][u] = log_add(beta[t][u], beta[t][u + 1] + label[t][u])
    return beta


def gradient(blank: Lattice, label: Lattice) -> tuple[Lattice, Lattice]:
    """Derivative of -log likelihood by the log-probability of each arc: blank arcs (T, U1), label
    arcs (T, U).

    It is minus the share of the likelihood that takes the arc: -alpha(t, u) blank(t, u) beta(t+1,
    u) / beta(0, 0) and
    -alpha(t, u) label(t, u) beta(t, u+1) / beta(0, 0); the last blank, which all paths take, has
    beta(T, U) = 1.
    """
    alpha, beta = forward_variables(blank, label), backward_variables(blank, label)
    T, U1, total = (
        len(beta),
        len(beta[0]),
        max(beta[0][0], -1e300),
    )  # no path at all has no share, rather than 0 / 0
    after = [*beta[1:], [-inf] * (U1 - 1) + [0.0]]
    blank_posterior = [
        [-exp(alpha[t][u] + blank[t][u] + after[t][u] - total) for u in range(U1)] for t in range(T)
    ]
    label_posterior = [
        [-exp(alpha[t][u] + label[t][u] + beta[t][u + 1] - total) for u in range(U1 - 1)]
        for t in range(T)
    ]
    return blank_posterior, label_posterior


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    return from_arcs(
        logits,
        targets,
        nodes,
        options,
        lambda *arcs: (backward_variables(*arcs[:2])[0][0], *gradient(*arcs[:2])),
    )


def from_arcs(
    logits: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    solve: Callable[[Any, Any, Any], tuple],
) -> Tensor:
    """Losses (B,), by `solve` for each utterance: from its arcs to log-likelihood and derivatives
    by blank and label arcs.

    solve(blank, label, duration) takes nested lists of log-probabilities, (T, U1), (T, U) and (T,
    U1, n). A model with durations has n arcs where others have one, so its derivatives have a last
    dimension n.
    """
    costs, grads = (
        torch.zeros(size, dtype=torch.float64, device="cpu")
        for size in (len(nodes.table), logits.shape)
    )
    V = logits.shape[-1] - len(options.durations)
    for b, (T, U) in enumerate(nodes.table[:, :2].tolist()):
        scores = nodes.grid(logits, b)[:T, : U + 1].double().cpu()
        index = targets[b, :U].cpu().expand(T, U)[..., None]
        logp = (
            scores[..., :V].log_softmax(-1) if options.fused_log_softmax else scores[..., :V]
        )  # (T, U1, V)
        duration, lowered = scores[..., V:].log_softmax(-1), logp - options.sigma  # (T, U1, n)
        arcs = (
            lowered[..., options.blank].tolist(),
            lowered[:, :U].gather(-1, index)[..., 0].tolist(),
            duration.tolist(),
        )
        total, *derivatives = solve(*arcs)
        blank_posterior, label_posterior = (
            torch.tensor(part, dtype=torch.float64, device="cpu") for part in derivatives
        )
        label_posterior = (1 + options.fastemit_lambda) * label_posterior.view(
            T, U, *blank_posterior.shape[2:]
        )  # an empty list has no width
        whole = nodes.of(grads).grid(grads, b)[:T, : U + 1]
        grad, tail = whole[..., :V], whole[..., V:]
        if blank_posterior.dim() == 3:
            tail += blank_posterior
            tail[:, :U] += label_posterior
            tail -= duration.exp() * tail.sum(-1, keepdim=True)
            blank_posterior, label_posterior = blank_posterior.sum(-1), label_posterior.sum(-1)
        grad[..., options.blank] = blank_posterior
        grad[:, :U].scatter_(-1, index, label_posterior[..., None])
        if options.fused_log_softmax:  # chain rule: d logp[k] / d logit[v] = (k == v) - softmax[v]
            grad -= logp.exp() * grad.sum(-1, keepdim=True)
        if options.clamp > 0:
            whole.clamp_(-options.clamp, options.clamp)
        costs[b] = -total
    costs = costs.to(logits.device, torch.promote_types(logits.dtype, torch.float32))
    return Given.apply(logits, costs, grads.to(logits), nodes)


class Given(torch.autograd.Function):
    """Losses (B,) whose gradient over the logits is known already."""

    @staticmethod
    def forward(ctx, logits, costs, grads, nodes):
        ctx.save_for_backward(grads)
        ctx.nodes = nodes
        return costs

    @staticmethod
    def backward(ctx, incoming):
        refuse_second_derivative()
        (grads,) = ctx.saved_tensors
        grads = grads.clone()
        for b in range(len(incoming)):
            ctx.nodes.of(grads).grid(grads, b).mul_(incoming[b])
        return grads, None, None, None
