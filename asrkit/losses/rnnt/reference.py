"""The transducer loss as the textbook has it: loops over t and u, one utterance at a time, in
float64. It is there to be read, and to test the other implementations against.

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
# log-likelihood, and derivatives of its negative by blank and label arcs
Solution = tuple[float, Any, Any]
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


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""

    def solve(blank: Lattice, label: Lattice, _: Any) -> Solution:
        beta = backward_variables(blank, label)
        by_blank, by_label = gradient(blank, label)
        return beta[0][0], by_blank, by_label

    return from_arcs(logits, targets, nodes, options, solve)


def from_arcs(
    logits: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    solve: Callable[[Any, Any, Any], Solution],
) -> Tensor:
    """Losses in nats, (B,), by `solve` for one utterance at a time.

    Args:
        logits: (B, T, U1, V + n), or packed (N, V).
        targets: (B, U), int64.
        nodes: where the lattice's nodes lie in `logits`.
        options: of the loss, checked.
        solve: solve(blank, label, duration) of nested lists of log-probabilities, (T, U1), (T, U)
            and (T, U1, n), returns the log-likelihood and the derivatives of its negative by blank
            and label arcs. With durations there are n arcs where there was one, so derivatives have
            a last dimension n.
    """
    costs = torch.zeros(len(nodes.table), dtype=torch.float64, device="cpu")
    grads = torch.zeros(logits.shape, dtype=torch.float64, device="cpu")
    grad_nodes = nodes.strided_like(grads)
    V = logits.shape[-1] - len(options.durations)
    for b, (T, U) in enumerate(nodes.table[:, :2].tolist()):
        valid = nodes.grid(logits, b)[:T, : U + 1]
        scores = valid.double().cpu()
        labels = targets[b, :U].cpu()
        labels = labels.expand(T, U)[..., None]
        logp = scores[..., :V]  # (T, U1, V)
        if options.fused_log_softmax:
            logp = logp.log_softmax(-1)
        duration = scores[..., V:].log_softmax(-1)  # (T, U1, n)
        lowered = logp - options.sigma
        blank = lowered[..., options.blank]
        label = lowered[:, :U].gather(-1, labels)[..., 0]
        solution = solve(blank.tolist(), label.tolist(), duration.tolist())
        log_likelihood, by_blank_list, by_label_list = solution
        costs[b] = -log_likelihood
        by_blank = as_tensor(by_blank_list)
        by_label = as_tensor(by_label_list)
        # the view gives a width to an empty list, U = 0
        by_label = by_label.view(T, U, *by_blank.shape[2:])
        by_label = (1 + options.fastemit_lambda) * by_label
        grad = grad_nodes.grid(grads, b)[:T, : U + 1]
        if by_blank.dim() == 3:
            _write_by_duration(grad[..., V:], duration, by_blank, by_label)
            by_blank = by_blank.sum(-1)
            by_label = by_label.sum(-1)
        by_token = grad[..., :V]
        by_token[..., options.blank] = by_blank
        by_token[:, :U].scatter_(-1, labels, by_label[..., None])
        if options.fused_log_softmax:
            _through_log_softmax(by_token, logp)
        if options.clamp > 0:
            grad.clamp_(-options.clamp, options.clamp)
    costs_dtype = torch.promote_types(logits.dtype, torch.float32)
    costs = costs.to(logits.device, costs_dtype)
    return KnownGradient.apply(logits, costs, grads.to(logits), nodes)


def as_tensor(nested: list) -> Tensor:
    """A nested list of numbers in float64, on the CPU whatever torch's default device is."""
    return torch.tensor(nested, dtype=torch.float64, device="cpu")


def _write_by_duration(out: Tensor, duration: Tensor, by_blank: Tensor, by_label: Tensor) -> None:
    """Write the gradient over the duration logits into `out` (T, U1, n), which holds zeros.

    Args:
        out: where to write.
        duration: (T, U1, n), log-probability of each duration.
        by_blank: (T, U1, n), derivatives by blank arcs.
        by_label: (T, U, n), derivatives by label arcs.
    """
    U = by_label.shape[1]
    out += by_blank
    out[:, :U] += by_label
    _through_log_softmax(out, duration)


def _through_log_softmax(by_logp: Tensor, logp: Tensor) -> None:
    """Turn the gradient over `logp` (..., k) into that over its logits, in place.

    Chain rule: d logp[k] / d logit[v] = (k == v) - softmax[v].
    """
    total = by_logp.sum(-1, keepdim=True)
    by_logp -= logp.exp() * total


class KnownGradient(torch.autograd.Function):
    """Losses (B,) whose gradient over the logits is known already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, costs: Tensor, grads: Tensor, nodes: Nodes) -> Tensor:
        """The `costs` of `logits`; `ctx` keeps `grads`, and the `nodes` that they belong to."""
        ctx.save_for_backward(grads)
        ctx.nodes = nodes
        return costs

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        refuse_second_derivative()
        (grads,) = ctx.saved_tensors
        scaled = grads.clone()
        nodes = ctx.nodes.strided_like(scaled)
        for b, by_cost in enumerate(incoming[0]):
            nodes.grid(scaled, b).mul_(by_cost)
        no_gradients = [None] * 3  # costs, grads, nodes
        return (scaled, *no_gradients)
