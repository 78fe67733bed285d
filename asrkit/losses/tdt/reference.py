"""The TDT loss as the paper has it: loops over arcs, one utterance at a time, float64. Lesson and
oracle.

The lattice is the transducer's, with longer arcs: a node (t, u) emits a token and, apart from it, a
duration d, and lands on frame t + d. Blank with d > 0 goes to (t+d, u), the next label to (t+d,
u+1). The end is (T, U), which a blank alone may enter, by landing exactly there. A path is as
likely as the product of the tokens and durations along it.
Source: H. Xu et al., "Efficient Sequence Transduction by Jointly Predicting Tokens and Durations",
arXiv 2304.06795, section 3.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import exp, inf

from torch import Tensor

from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.losses.rnnt.reference import Lattice, from_arcs, log_add

Arc = tuple[int, int, int, int, int, float]


def arcs(
    blank: Lattice, label: Lattice, duration: list[Lattice], durations: tuple[int, ...]
) -> Iterator[Arc]:
    """All arcs (t, u, i, t', u', log-probability): from (t, u), with the i-th duration, to (t',
    u'); sources in order.

    blank (T, U1), label (T, U) and duration (T, U1, n) are log-probabilities at each node, in nats.
    """
    T, U1 = len(blank), len(blank[0])
    for t, u, (i, d) in product(range(T), range(U1), enumerate(durations)):
        if d > 0 and t + d <= T:
            yield t, u, i, t + d, u, blank[t][u] + duration[t][u][i]
        if u + 1 < U1 and t + d < T:
            yield t, u, i, t + d, u + 1, label[t][u] + duration[t][u][i]


def forward_variables(ways: Iterable[Arc], T: int, U1: int) -> Lattice:
    """log alpha(t, u), (T + 1, U1): probability of all ways from (0, 0) to (t, u); alpha(T, U) is
    the likelihood.
    """
    alpha = [[-inf] * U1 for _ in range(T + 1)]
    alpha[0][0] = 0.0
    for t, u, _, t2, u2, score in ways:
        alpha[t2][u2] = log_add(alpha[t2][u2], alpha[t][u] + score)
    return alpha


def backward_variables(ways: list[Arc], T: int, U1: int) -> Lattice:
    """log beta(t, u), (T + 1, U1): probability of all ways from (t, u) to the end; beta(0, 0) is
    the likelihood.
    """
    beta = [[-inf] * U1 for _ in range(T + 1)]
    beta[T][U1 - 1] = 0.0
    for t, u, _, t2, u2, score in reversed(ways):
        beta[t][u] = log_add(beta[t][u], score + beta[t2][u2])
    return beta


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments."""

    def solve(
        blank: Lattice, label: Lattice, duration: list[Lattice]
    ) -> tuple[float, list[Lattice], list[Lattice]]:
        ways, T, U1 = (
            list(arcs(blank, label, duration, options.durations)),
            len(blank),
            len(blank[0]),
        )
        alpha, beta = forward_variables(ways, T, U1), backward_variables(ways, T, U1)
        total = max(beta[0][0], -1e300)  # no path at all has no share, rather than 0 / 0
        blank_posterior, label_posterior = (
            [[[0.0] * len(options.durations) for _ in row] for row in kind]
            for kind in (blank, label)
        )
        for t, u, i, t2, u2, score in ways:  # minus the share of the likelihood that takes the arc
            (blank_posterior if u2 == u else label_posterior)[t][u][i] = -exp(
                alpha[t][u] + score + beta[t2][u2] - total
            )
        return beta[0][0], blank_posterior, label_posterior

    return from_arcs(logits, targets, nodes, options, solve)
