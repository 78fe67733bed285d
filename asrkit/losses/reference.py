"""The losses as the textbooks have them: loops over t and u, one utterance at a time, in float64.
They are there to be read, and to test the other implementations against.

A lattice has a node (t, u) for "frame t is read, u labels are out" and two arcs that leave it:
blank, to (t+1, u), and the next label, to (t, u+1). An alignment is a path from (0, 0) through the
blank that leaves (T-1, U). The likelihood is the sum over all C(T-1+U, U) paths of the products of
their arcs; two recursions sum them in T U1 steps. Below, blank (T, U1) and label (T, U) are nested
lists: the log-probability of the arcs that leave each node, in nats.

TDT's lattice has longer arcs: a node emits a token and, independently, a duration d, and lands on
frame t + d. Blank with d > 0 goes to (t+d, u), the next label to (t+d, u+1). The end is (T, U),
which only a blank may enter, by landing exactly there.

Sources: A. Graves, "Sequence Transduction with Recurrent Neural Networks", arXiv 1211.3711,
sections 2.4 and 2.5; H. Xu et al., "Efficient Sequence Transduction by Jointly Predicting Tokens
and Durations", arXiv 2304.06795, section 3.
"""

from collections.abc import Iterator
from itertools import product
from math import exp, inf, log1p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.losses.gradient import refuse_second_derivative
from asrkit.losses.lattice import LatticeOptions, Nodes

Lattice = list[list[float]]
DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
NO_PATH = -1e300  # in place of log 0, so that a posterior is 0 rather than 0 / 0


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    if a == -inf:
        return b
    if b == -inf:
        return a
    return max(a, b) + log1p(exp(-abs(a - b)))


def forward_variables(blank: Lattice, label: Lattice) -> Lattice:
    """log alpha(t, u), (T, U1): probability of all paths from (0, 0) to (t, u).

    alpha(t, u) = alpha(t-1, u) blank(t-1, u) + alpha(t, u-1) label(t, u-1), from alpha(0, 0) = 1.
    """
    T = len(blank)
    U1 = len(blank[0])
    alpha = empty_lattice(T, U1)
    alpha[0][0] = 0.0
    for t in range(T):
        for u in range(U1):
            if t > 0:
                by_blank = alpha[t - 1][u] + blank[t - 1][u]
                alpha[t][u] = by_blank
            if u > 0:
                by_label = alpha[t][u - 1] + label[t][u - 1]
                alpha[t][u] = log_add(alpha[t][u], by_label)
    return alpha


def backward_variables(blank: Lattice, label: Lattice) -> Lattice:
    """log beta(t, u), (T, U1): probability of all paths from (t, u) to the end.

    beta(t, u) = beta(t+1, u) blank(t, u) + beta(t, u+1) label(t, u), from
    beta(T-1, U) = blank(T-1, U); beta(0, 0) is the likelihood.
    """
    T = len(blank)
    U1 = len(blank[0])
    beta = empty_lattice(T, U1)
    beta[-1][-1] = blank[-1][-1]
    for t in reversed(range(T)):
        for u in reversed(range(U1)):
            if t + 1 < T:
                by_blank = beta[t + 1][u] + blank[t][u]
                beta[t][u] = by_blank
            if u + 1 < U1:
                by_label = beta[t][u + 1] + label[t][u]
                beta[t][u] = log_add(beta[t][u], by_label)
    return beta


def empty_lattice(rows: int, U1: int) -> Lattice:
    """log 0 at every node: (rows, U1)."""
    return [[-inf] * U1 for _ in range(rows)]


def gradient(blank: Lattice, label: Lattice) -> tuple[Lattice, Lattice]:
    """Derivative of -log likelihood by the log-probability of each arc: blank arcs (T, U1), label
    arcs (T, U).

    It is minus the posterior of the arc:

        -alpha(t, u) blank(t, u) beta(t+1, u) / beta(0, 0)
        -alpha(t, u) label(t, u) beta(t, u+1) / beta(0, 0)

    where beta(T, U) = 1 follows the last blank, which all paths take.
    """
    alpha = forward_variables(blank, label)
    beta = backward_variables(blank, label)
    T = len(beta)
    U = len(beta[0]) - 1
    total = max(beta[0][0], NO_PATH)
    after_last_frame = [-inf] * U + [0.0]  # beta(T, U) = 1
    beta.append(after_last_frame)
    by_blank: Lattice = []
    by_label: Lattice = []
    for t in range(T):
        blank_row = []
        label_row = []
        for u in range(U + 1):
            log_posterior = alpha[t][u] + blank[t][u] + beta[t + 1][u] - total
            blank_row.append(-exp(log_posterior))
        for u in range(U):
            log_posterior = alpha[t][u] + label[t][u] + beta[t][u + 1] - total
            label_row.append(-exp(log_posterior))
        by_blank.append(blank_row)
        by_label.append(label_row)
    return by_blank, by_label


class Arc(NamedTuple):
    """TDT's arc from node (t, u), with the i-th duration, to node (t2, u2); `logp` in nats."""

    t: int
    u: int
    i: int
    t2: int
    u2: int
    logp: float


def tdt_arcs(
    blank: Lattice, label: Lattice, duration: list[Lattice], durations: tuple[int, ...]
) -> Iterator[Arc]:
    """All arcs of TDT's lattice, in the order of the nodes that they leave.

    Args:
        blank: (T, U1), log-probability of blank at each node, in nats.
        label: (T, U), of the next label.
        duration: (T, U1, n), of each duration.
        durations: the n durations in frames.
    """
    T = len(blank)
    U1 = len(blank[0])
    for t, u, (i, d) in product(range(T), range(U1), enumerate(durations)):
        t2 = t + d
        duration_logp = duration[t][u][i]
        if d > 0 and t2 <= T:
            logp = blank[t][u] + duration_logp
            yield Arc(t, u, i, t2, u, logp)
        if u + 1 < U1 and t2 < T:
            logp = label[t][u] + duration_logp
            yield Arc(t, u, i, t2, u + 1, logp)


def tdt_gradient(arcs: list[Arc], T: int, U1: int, n: int) -> tuple[float, Tensor, Tensor]:
    """TDT's log-likelihood, and the derivatives of its negative by the `arcs`: (T, U1, n) each.

    As for RNN-T they are minus the posteriors, of the blank arcs and of the label arcs. alpha(t, u)
    and beta(t, u) have a row for frame T too: alpha(T, U) = beta(0, 0) is the likelihood.
    """
    alpha = empty_lattice(T + 1, U1)
    beta = empty_lattice(T + 1, U1)
    alpha[0][0] = 0.0
    beta[T][U1 - 1] = 0.0
    for t, u, _, t2, u2, logp in arcs:
        alpha[t2][u2] = log_add(alpha[t2][u2], alpha[t][u] + logp)
    for t, u, _, t2, u2, logp in reversed(arcs):
        beta[t][u] = log_add(beta[t][u], beta[t2][u2] + logp)
    total = max(beta[0][0], NO_PATH)
    by_blank, by_label = torch.zeros(2, T, U1, n, **DOUBLE)
    for t, u, i, t2, u2, logp in arcs:
        by_arc = by_blank if u2 == u else by_label
        by_arc[t, u, i] = -exp(alpha[t][u] + logp + beta[t2][u2] - total)
    return beta[0][0], by_blank, by_label


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    costs = torch.zeros(len(nodes.table), **DOUBLE)
    grads = torch.zeros(logits.shape, **DOUBLE)
    n = len(options.durations)
    V = logits.shape[-1] - n
    for b, (T, U) in enumerate(nodes.table[:, :2].tolist()):
        scores = nodes.grid(logits, b)[:T, : U + 1].double().cpu()
        labels = targets[b, :U].cpu().expand(T, U)[..., None]
        logp = scores[..., :V]  # (T, U1, V)
        if options.fused_log_softmax:
            logp = logp.log_softmax(-1)
        duration = scores[..., V:].log_softmax(-1)  # (T, U1, n)
        lowered = logp - options.sigma
        blank = lowered[..., options.blank].tolist()
        label = lowered[:, :U].gather(-1, labels)[..., 0].tolist()
        by_duration = torch.zeros_like(duration)
        if n and not options.as_rnnt:
            arcs = [*tdt_arcs(blank, label, duration.tolist(), options.durations)]
            log_likelihood, by_blank, by_label = tdt_gradient(arcs, T, U + 1, n)
            by_label *= 1 + options.fastemit_lambda
            by_duration = by_blank + by_label
            by_blank, by_label = by_blank.sum(-1), by_label.sum(-1)[:, :U]
        else:
            log_likelihood = backward_variables(blank, label)[0][0]
            by_blank, by_label = (torch.tensor(part, **DOUBLE) for part in gradient(blank, label))
            # the view gives a width to an empty list, U = 0
            by_label = (1 + options.fastemit_lambda) * by_label.view(T, U)
        grad = nodes.grid(grads, b)[:T, : U + 1]
        by_token = grad[..., :V]
        by_token[..., options.blank] = by_blank
        by_token[:, :U].scatter_(-1, labels, by_label[..., None])
        # chain rule: d logp[k] / d logit[v] = (k == v) - softmax[v]
        if options.fused_log_softmax:
            by_token -= logp.exp() * by_token.sum(-1, keepdim=True)
        grad[..., V:] = by_duration - duration.exp() * by_duration.sum(-1, keepdim=True)
        if options.clamp > 0:
            grad.clamp_(-options.clamp, options.clamp)
        costs[b] = -log_likelihood
    costs = costs.to(logits.device, torch.promote_types(logits.dtype, torch.float32))
    return KnownGradient.apply(logits, costs, grads, nodes)


class KnownGradient(torch.autograd.Function):
    """Losses (B,) whose gradient over the logits is known already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, costs: Tensor, grads: Tensor, nodes: Nodes) -> Tensor:
        """The `costs` of `logits`; `ctx` keeps `grads`, and the `nodes` that they belong to."""
        ctx.save_for_backward(grads.to(logits))
        ctx.nodes = nodes
        return costs

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        refuse_second_derivative()
        scaled = ctx.saved_tensors[0].clone()
        for b, by_cost in enumerate(incoming[0]):
            ctx.nodes.grid(scaled, b).mul_(by_cost)
        return scaled, None, None, None
