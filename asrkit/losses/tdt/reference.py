"""The TDT loss as the paper has it: loops over arcs, one utterance at a time, in float64. Lesson
and oracle.

The lattice is the transducer's, with longer arcs: a node (t, u) emits a token and, independently, a
duration d, and lands on frame t + d. Blank with d > 0 goes to (t+d, u), the next label to
(t+d, u+1). The end is (T, U), which only a blank may enter, by landing exactly there. The
probability of a path is the product of the tokens and durations along it.

Source: H. Xu et al., "Efficient Sequence Transduction by Jointly Predicting Tokens and Durations",
arXiv 2304.06795, section 3.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import exp, inf
from typing import NamedTuple

from torch import Tensor

from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.losses.rnnt.reference import NO_PATH, Lattice, from_arcs, log_add


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
        if d > 0 and t + d <= T:
            yield Arc(t, u, i, t + d, u, blank[t][u] + duration[t][u][i])
        if u + 1 < U1 and t + d < T:
            yield Arc(t, u, i, t + d, u + 1, label[t][u] + duration[t][u][i])


def forward_variables(arcs: Iterable[Arc], T: int, U1: int) -> Lattice:
    """log alpha(t, u), (T + 1, U1), by the `arcs`: probability of all paths from (0, 0) to (t, u).

    alpha(T, U) is the likelihood.
    """
    alpha = [[-inf] * U1 for _ in range(T + 1)]
    alpha[0][0] = 0.0
    for t, u, _, t2, u2, logp in arcs:
        alpha[t2][u2] = log_add(alpha[t2][u2], alpha[t][u] + logp)
    return alpha


def backward_variables(arcs: list[Arc], T: int, U1: int) -> Lattice:
    """log beta(t, u), (T + 1, U1), by the `arcs`: probability of all paths from (t, u) to the end.

    beta(0, 0) is the likelihood.
    """
    beta = [[-inf] * U1 for _ in range(T + 1)]
    beta[T][U1 - 1] = 0.0
    for t, u, _, t2, u2, logp in reversed(arcs):
        beta[t][u] = log_add(beta[t][u], logp + beta[t2][u2])
    return beta


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""

    def solve(
        blank: Lattice, label: Lattice, duration: list[Lattice]
    ) -> tuple[float, list[Lattice], list[Lattice]]:
        T = len(blank)
        U1 = len(blank[0])
        n = len(options.durations)
        all_arcs = list(arcs(blank, label, duration, options.durations))
        alpha = forward_variables(all_arcs, T, U1)
        beta = backward_variables(all_arcs, T, U1)
        total = max(beta[0][0], NO_PATH)
        by_blank = [[[0.0] * n for _ in row] for row in blank]
        by_label = [[[0.0] * n for _ in row] for row in label]
        for t, u, i, t2, u2, logp in all_arcs:
            by_arc = by_label
            if u2 == u:
                by_arc = by_blank
            # minus the posterior of the arc
            by_arc[t][u][i] = -exp(alpha[t][u] + logp + beta[t2][u2] - total)
        return beta[0][0], by_blank, by_label

    return from_arcs(logits, targets, nodes, options, solve)
