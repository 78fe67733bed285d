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
from asrkit.losses.nodes import FRAMES, ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes
from asrkit.losses.rnnt.wavefront import upright


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
    last_blank = 0
    if d:
        last_blank = max(T + 1 - d, 0)
    return blank[:last_blank], label[: max(T - d, 0), :-1]


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
    source = reach - torch.tensor(durations, device=arcs_in.device)
    for k in range(1, diagonals):
        by_blank = sums[source + k, :, 1:] + arcs_in[:, 0, k]
        by_label = sums[source + (k - 1), :, :-1] + arcs_in[:, 1, k]
        torch.logsumexp(torch.cat((by_blank, by_label)), 0, out=sums[reach + k, :, 1:])
    return upright(sums[reach:, :, 1:], U1)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs have their own dtype, sums are float64. Of `options` it reads durations and
    fastemit_lambda.
    """
    B = len(nodes.table)
    longest = int(nodes.table[:, FRAMES].max())
    durations = [min(d, longest + 1) for d in options.durations]
    sums = sweep(_arcs_in(arcs, nodes, durations, grad), durations)
    last_frame, last_row = nodes.on(sums.device)[:, :2].unbind(1)
    log_likelihood = sums[torch.arange(B, device=sums.device), last_frame, last_row]
    if not grad:
        return ArcPosteriors(log_likelihood)
    assert arcs.duration_logp is not None
    blank_posterior = torch.zeros_like(arcs.blank_logp)
    label_posterior = torch.zeros_like(arcs.label_logp)
    duration_posterior = torch.zeros_like(arcs.duration_logp)
    # an utterance without any path gets posteriors of 0 rather than 0 / 0
    floor = log_likelihood.clamp(min=torch.finfo(log_likelihood.dtype).min)
    for b in range(B):
        frames, width, where = nodes.slices(b)
        alpha = sums[b, :frames, :width] - floor[b]
        beta = sums[B + b, : frames + 1, :width].flip(0, 1)
        for i, d in enumerate(durations):
            blank, label = leaving(arcs, nodes, b, i, d)
            m = len(blank)
            k = len(label)
            by_blank = (alpha[:m] + blank + beta[d : d + m]).exp().flatten()
            by_label = (alpha[:k, :-1] + label + beta[d : d + k, 1:]).exp()
            by_label *= 1 + options.fastemit_lambda
            by_label = torch.nn.functional.pad(by_label, (0, 1)).flatten()
            blank_posterior[where][: len(by_blank)] += by_blank
            duration_posterior[where, i][: len(by_blank)] += by_blank
            label_posterior[where][: len(by_label)] += by_label
            duration_posterior[where, i][: len(by_label)] += by_label
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior, duration_posterior)


def _arcs_in(arcs: ArcLogProbs, nodes: Nodes, durations: list[int], grad: bool) -> Tensor:
    """Blank and label arcs into each node, skewed: (n, 2, T + U1, B or with `grad` 2 B, U1).

    The second B lattices are the first turned by 180 degrees.
    """
    B = len(nodes.table)
    T, U = nodes.table[:, :2].amax(0).tolist()
    U1 = U + 1
    lattices = B
    if grad:
        lattices = 2 * B  # forwards and backwards
    size = (len(durations), 2, T + U1, lattices, U1)
    arcs_in = arcs.blank_logp.new_full(size, -torch.inf)
    for i, d in enumerate(durations):
        blanks = upright(arcs_in[i, 0], U1)
        labels = upright(arcs_in[i, 1], U1)
        for b in range(B):
            blank, label = leaving(arcs, nodes, b, i, d)
            m, width = blank.shape
            k = len(label)
            blanks[b, d : d + m, :width] = blank
            labels[b, d : d + k, 1:width] = label
            if grad:
                blanks[B + b, d : d + m, :width] = blank.flip(0, 1)
                labels[B + b, d + 1 : d + 1 + k, 1:width] = label.flip(0, 1)
    return arcs_in
