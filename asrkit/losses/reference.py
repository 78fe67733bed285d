"""The losses as textbooks define them: loops over t and u, one utterance at a time, in float64.

They are written for reading, and the other implementations are tested against them. The passes over
the logits come from wavefront.py, in float64 too.

The lattice has a node (t, u) for "frame t is read, u labels are emitted" and two arcs that leave
it: blank, to (t+1, u), and the next label, to (t, u+1). An alignment is a path from (0, 0) through
the blank that leaves (T-1, U). The likelihood is the sum over all C(T-1+U, U) paths of the products
of their arcs; two recursions sum them in T U1 steps. Below, blank (T, U1) and label (T, U) are
nested lists: the log-probability of the arcs that leave each node, in nats.

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
from typing import NamedTuple

import torch

from asrkit.devices import CPU_DOUBLE
from asrkit.losses.lattice import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes

Lattice = list[list[float]]
# Replaces the log-likelihood of an utterance without a path, so that posteriors are 0, not 0 / 0.
NO_PATH = -1e300


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


def empty_lattice(frames: int, U1: int) -> Lattice:
    """log 0 at every node: (frames, U1)."""
    return [[-inf] * U1 for _ in range(frames)]


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
        blank_of_frame = []
        label_row = []
        for u in range(U + 1):
            log_posterior = alpha[t][u] + blank[t][u] + beta[t + 1][u] - total
            blank_of_frame.append(-exp(log_posterior))
        for u in range(U):
            log_posterior = alpha[t][u] + label[t][u] + beta[t][u + 1] - total
            label_row.append(-exp(log_posterior))
        by_blank.append(blank_of_frame)
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
    """Yield all arcs of TDT's lattice, ordered by source node.

    Args:
        blank: Log-probability of blank at each node, in nats: (T, U1).
        label: Log-probability of the next label: (T, U).
        duration: Log-probability of each duration: (T, U1, n).
        durations: The n durations in frames.
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


def tdt_variables(arcs: list[Arc], T: int, U1: int) -> tuple[Lattice, Lattice]:
    """TDT's log alpha(t, u) and log beta(t, u), (T + 1, U1) each, from its `arcs`.

    alpha(T, U) = beta(0, 0) is the likelihood.
    """
    alpha = empty_lattice(T + 1, U1)
    alpha[0][0] = 0.0
    for t, u, _, t2, u2, logp in arcs:
        by_arc = alpha[t][u] + logp
        alpha[t2][u2] = log_add(alpha[t2][u2], by_arc)
    beta = empty_lattice(T + 1, U1)
    beta[T][U1 - 1] = 0.0
    for t, u, _, t2, u2, logp in reversed(arcs):
        by_arc = logp + beta[t2][u2]
        beta[t][u] = log_add(beta[t][u], by_arc)
    return alpha, beta


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Return log-likelihoods and posteriors of the `arcs`; it ignores `grad`.

    It reads `durations` and `fastemit_lambda` from `options`.
    """
    n = len(options.durations)
    size = (nodes.count, max(n, 1))
    log_likelihood = torch.empty(len(nodes.table), **CPU_DOUBLE)
    by_blank, by_label = torch.zeros((2, *size), **CPU_DOUBLE)
    for b in range(len(log_likelihood)):
        T, U1, where = nodes.slices(b)
        blank = arcs.blank_logp[where].view(T, U1).tolist()
        label = arcs.label_logp[where].view(T, U1)[:, :-1].tolist()
        blank_posterior = by_blank[where].view(T, U1, -1)
        label_posterior = by_label[where].view(T, U1, -1)
        if not n:
            log_likelihood[b] = backward_variables(blank, label)[0][0]
            by_blank_arc, by_label_arc = gradient(blank, label)
            blank_posterior[..., 0] = -torch.tensor(by_blank_arc, **CPU_DOUBLE)
            label_posterior[:, :-1, 0] = -torch.tensor(by_label_arc, **CPU_DOUBLE)
            continue
        duration = arcs.duration_logp[where].view(T, U1, n).tolist()
        all_arcs = [*tdt_arcs(blank, label, duration, options.durations)]
        alpha, beta = tdt_variables(all_arcs, T, U1)
        log_likelihood[b] = beta[0][0]
        total = max(beta[0][0], NO_PATH)
        for t, u, i, t2, u2, logp in all_arcs:
            posterior = exp(alpha[t][u] + logp + beta[t2][u2] - total)
            by_arc = blank_posterior if u2 == u else label_posterior
            by_arc[t, u, i] = posterior
    by_label *= 1 + options.fastemit_lambda
    by_duration = (by_blank + by_label)[:, :n]
    posteriors = (by_blank.sum(1), by_label.sum(1), by_duration)
    return ArcPosteriors(log_likelihood, *(part.to(arcs.log_z) for part in posteriors))
