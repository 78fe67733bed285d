"""The TDT loss as the paper has it: loops over arcs, one utterance at a time, in float64. It is
there to be read, and to test the other implementations against.

The lattice is the transducer's, with longer arcs: a node (t, u) emits a token and, independently, a
duration d, and lands on frame t + d. Blank with d > 0 goes to (t+d, u), the next label to
(t+d, u+1). The end is (T, U), which only a blank may enter, by landing exactly there. The
probability of a path is the product of the tokens and durations along it.

Source: H. Xu et al., "Efficient Sequence Transduction by Jointly Predicting Tokens and Durations",
arXiv 2304.06795, section 3.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import exp
from typing import NamedTuple

from torch import Tensor

from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.losses.rnnt.reference import (
    NO_PATH,
    Lattice,
    Solution,
    empty_lattice,
    from_arcs,
    log_add,
)


class Arc(NamedTuple):
    """An arc from node (t, u), with the i-th duration, to node (t2, u2); `logp` in nats."""

    t: int
    u: int
    i: int
    t2: int
    u2: int
    logp: float


def arcs(
    blank: Lattice, label: Lattice, duration: list[Lattice], durations: tuple[int, ...]
) -> Iterator[Arc]:
    """All arcs of a lattice, in the order of the nodes that they leave.

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


def forward_variables(arcs: Iterable[Arc], T: int, U1: int) -> Lattice:
    """log alpha(t, u), (T + 1, U1), by the `arcs`: probability of all paths from (0, 0) to (t, u).

    alpha(T, U) is the likelihood.
    """
    alpha = empty_lattice(T + 1, U1)
    alpha[0][0] = 0.0
    for t, u, _, t2, u2, logp in arcs:
        by_arc = alpha[t][u] + logp
        alpha[t2][u2] = log_add(alpha[t2][u2], by_arc)
    return alpha


def backward_variables(arcs: list[Arc], T: int, U1: int) -> Lattice:
    """log beta(t, u), (T + 1, U1), by the `arcs`: probability of all paths from (t, u) to the end.

    beta(0, 0) is the likelihood.
    """
    beta = empty_lattice(T + 1, U1)
    beta[T][U1 - 1] = 0.0
    for t, u, _, t2, u2, logp in reversed(arcs):
        by_arc = logp + beta[t2][u2]
        beta[t][u] = log_add(beta[t][u], by_arc)
    return beta


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""

    def solve(blank: Lattice, label: Lattice, duration: list[Lattice]) -> Solution:
        T = len(blank)
        U1 = len(blank[0])
        n = len(options.durations)
        all_arcs = list(arcs(blank, label, duration, options.durations))
        alpha = forward_variables(all_arcs, T, U1)
        beta = backward_variables(all_arcs, T, U1)
        log_likelihood = beta[0][0]
        total = max(log_likelihood, NO_PATH)
        by_blank = _zeros(T, U1, n)
        by_label = _zeros(T, U1 - 1, n)
        for t, u, i, t2, u2, logp in all_arcs:
            by_arc = by_label
            if u2 == u:
                by_arc = by_blank
            log_posterior = alpha[t][u] + logp + beta[t2][u2] - total
            by_arc[t][u][i] = -exp(log_posterior)
        return log_likelihood, by_blank, by_label

    return from_arcs(logits, targets, nodes, options, solve)


def _zeros(T: int, width: int, n: int) -> list[Lattice]:
    """Zeros as nested lists: (T, width, n)."""
    return [[[0.0] * n for _ in range(width)] for _ in range(T)]
