"""TDT's lattice in plain torch: all nodes of an anti-diagonal t + u = k at once, of all utterances
at once.

An arc of duration d comes from d diagonals before, or d + 1 for a label, so a diagonal needs few
others. Layout and turned lattices are those of asrkit.losses.rnnt.wavefront. Memory beside the
logits, with gradient: B T U1 (V + n) for the gradient, 16 B (T + U1) ((n + 1) U1 + 1) bytes of
lattices and one tile. Some sixteen launches a diagonal.
"""

import torch
from torch import Tensor

from asrkit.losses.gradient import lattice_loss
from asrkit.losses.logit_rows import plain
from asrkit.losses.nodes import (
    FRAMES,
    LABELS,
    ArcLogProbs,
    ArcPosteriors,
    LatticeOptions,
    Nodes,
)
from asrkit.losses.rnnt.wavefront import (
    final_sums,
    finite,
    forward_and_backward,
    upright,
    with_last_row,
)
from asrkit.runtime import to_device


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return lattice_loss(logits, targets, nodes, options, plain, lattice)


def leaving(arcs: ArcLogProbs, nodes: Nodes, b: int, i: int, d: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the blank and label arcs of one duration that stay in the lattice.

    Args:
        arcs: of all nodes.
        nodes: of the batch.
        b: the utterance.
        i: index of the duration.
        d: the duration in frames.

    Returns:
        Blank arcs (T + 1 - d, U1), none for d = 0, and label arcs (T - d, U).
    """
    assert arcs.duration_logp is not None
    T, U1, where = nodes.slices(b)
    duration = arcs.duration_logp[where, i]
    blank = (arcs.blank_logp[where] + duration).view(T, U1)
    label = (arcs.label_logp[where] + duration).view(T, U1)
    blank_frames = 0
    if d:
        blank_frames = max(T + 1 - d, 0)
    label_frames = max(T - d, 0)
    return blank[:blank_frames], label[:label_frames, :-1]


def sweep(arcs_in: Tensor, durations: list[int]) -> Tensor:
    """Forward variables, float64 (lattices, T + 1, U1), from the arcs into each node.

    `arcs_in` (n, 2, T + U1, lattices, U1) holds blank and label arcs of each of the `durations`.
    """
    _, _, diagonals, lattices, U1 = arcs_in.shape
    reach = max(durations) + 1
    # a first column precedes u = 0
    size = (reach + diagonals, lattices, U1 + 1)
    sums = arcs_in.new_full(size, -torch.inf, dtype=torch.float64)
    sums[reach, :, 1] = 0
    nodes = sums[:, :, 1:]
    left = sums[:, :, :-1]
    blank_in = arcs_in[:, 0]
    label_in = arcs_in[:, 1]
    source = reach - to_device(torch.tensor(durations, device="cpu"), arcs_in.device)
    for k in range(1, diagonals):
        by_blank = nodes[source + k] + blank_in[:, k]
        by_label = left[source + (k - 1)] + label_in[:, k]
        by_arc = torch.cat((by_blank, by_label))
        torch.logsumexp(by_arc, 0, out=nodes[reach + k])
    return upright(nodes[reach:], U1)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs have their own dtype, sums are float64. Of `options` it reads durations and
    fastemit_lambda.
    """
    longest = int(nodes.table[:, FRAMES].max())
    durations = [min(d, longest + 1) for d in options.durations]
    arcs_in = _arcs_in(arcs, nodes, durations, grad)
    sums = sweep(arcs_in, durations)
    log_likelihood = final_sums(sums, nodes)
    if not grad:
        return ArcPosteriors(log_likelihood)
    assert arcs.duration_logp is not None
    blank_posterior = torch.zeros_like(arcs.blank_logp)
    label_posterior = torch.zeros_like(arcs.label_logp)
    duration_posterior = torch.zeros_like(arcs.duration_logp)
    label_factor = 1 + options.fastemit_lambda
    total = finite(log_likelihood)
    for b in range(len(nodes.table)):
        where = nodes.slices(b)[2]
        alpha, beta = forward_and_backward(sums, total[b], nodes, b)
        for i, d in enumerate(durations):
            blank, label = leaving(arcs, nodes, b, i, d)
            by_blank = _arc_posteriors(alpha, blank, beta[d:]).flatten()
            by_label = _arc_posteriors(alpha[:, :-1], label, beta[d:, 1:])
            by_label *= label_factor
            by_label = with_last_row(by_label).flatten()
            by_duration = duration_posterior[where, i]
            for by_arc, posterior in ((by_blank, blank_posterior), (by_label, label_posterior)):
                m = len(by_arc)
                posterior[where][:m] += by_arc
                by_duration[:m] += by_arc
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior, duration_posterior)


def _arc_posteriors(alpha: Tensor, arcs: Tensor, beta: Tensor) -> Tensor:
    """Posteriors of `arcs` (m, width), from `alpha` where they start and `beta` where they end.

    Rows of `alpha` and `beta` beyond the arcs' m frames are not read.
    """
    m = len(arcs)
    return (alpha[:m] + arcs + beta[:m]).exp()


def _arcs_in(arcs: ArcLogProbs, nodes: Nodes, durations: list[int], grad: bool) -> Tensor:
    """Blank and label arcs into each node, skewed: (n, 2, T + U1, B or with `grad` 2 B, U1).

    The second B lattices are the first turned by 180 degrees.
    """
    B = len(nodes.table)
    longest = int(nodes.table[:, FRAMES].max())
    most_rows = int(nodes.table[:, LABELS].max()) + 1
    lattices = B
    if grad:
        lattices = 2 * B  # forwards and backwards
    size = (len(durations), 2, longest + most_rows, lattices, most_rows)
    arcs_in = arcs.blank_logp.new_full(size, -torch.inf)
    for i, d in enumerate(durations):
        blanks = upright(arcs_in[i, 0], most_rows)
        labels = upright(arcs_in[i, 1], most_rows)
        for b in range(B):
            blank, label = leaving(arcs, nodes, b, i, d)
            U1 = blank.shape[1]
            blank_ends = slice(d, d + len(blank))
            label_ends = slice(d, d + len(label))
            blanks[b, blank_ends, :U1] = blank
            labels[b, label_ends, 1:U1] = label
            if grad:
                turned = B + b
                label_starts = slice(d + 1, d + 1 + len(label))
                blanks[turned, blank_ends, :U1] = blank.flip(0, 1)
                labels[turned, label_starts, 1:U1] = label.flip(0, 1)
    return arcs_in
