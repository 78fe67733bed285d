"""TDT's lattice in plain torch: all nodes of an anti-diagonal t + u = k at once, of all utterances
at once.

An arc of duration d comes from d diagonals before, or d + 1 for a label, so that a diagonal needs
few others. Layout and turned lattices are those of asrkit.losses.rnnt.wavefront. Memory beside the
logits, with gradient: B T U1 (V + n) for the gradient, 16 B (T + U1) ((n + 1) U1 + 1) bytes of
lattices and one tile. Some sixteen launches a diagonal.
"""

import torch
from torch import Tensor

from asrkit.losses.gradient import lattice_loss
from asrkit.losses.logit_rows import plain
from asrkit.losses.nodes import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes
from asrkit.losses.rnnt.wavefront import upright


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    return lattice_loss(logits, targets, nodes, options, plain, lattice)


def leaving(scores: ArcLogProbs, nodes: Nodes, b: int, i: int, d: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the arcs of utterance b with its i-th duration d: blank (T+1-d, U1),
    none for d = 0, label (T-d, U).
    """
    assert scores.duration_logp is not None
    T, U1, where = nodes.slices(b)
    blank, label = (
        (part[where] + scores.duration_logp[where, i]).view(T, U1)
        for part in (scores.blank_logp, scores.label_logp)
    )
    return blank[: max(T + 1 - d, 0) if d else 0], label[: max(T - d, 0), :-1]


def sweep(ways: Tensor, durations: list[int]) -> Tensor:
    """Forward variables in float64, (rows, T + 1, U1), from blank and label arcs into each node,
    (n, 2, T + U1, rows, U1).
    """
    _, _, diagonals, rows, U1 = ways.shape
    reach = max(durations) + 1
    sums = ways.new_full(
        (reach + diagonals, rows, U1 + 1), -torch.inf, dtype=torch.float64
    )  # a column precedes u = 0
    sums[reach, :, 1] = 0
    source = reach - torch.tensor(durations, device=ways.device)
    for k in range(1, diagonals):
        blank_posterior, label_posterior = (
            sums[source + k, :, 1:] + ways[:, 0, k],
            sums[source + (k - 1), :, :-1] + ways[:, 1, k],
        )
        torch.logsumexp(
            torch.cat((blank_posterior, label_posterior)), 0, out=sums[reach + k, :, 1:]
        )
    return upright(sums[reach:, :, 1:], U1)


def lattice(
    scores: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """Log-likelihoods and shares by anti-diagonals; arcs in the dtype of the scores, sums in
    float64.
    """
    assert scores.duration_logp is not None
    lengths, B, device = nodes.table[:, :2], len(nodes.table), scores.blank_logp.device
    T, U1 = (lengths.amax(0) + lengths.new_tensor([0, 1])).tolist()
    durations = [min(d, T + 1) for d in options.durations]
    ways = scores.blank_logp.new_full(
        (len(durations), 2, T + U1, 2 * B if grad else B, U1), -torch.inf
    )
    for i, d in enumerate(durations):
        blanks, labels = upright(ways[i, 0], U1), upright(ways[i, 1], U1)
        for b in range(B):
            blank, label = leaving(scores, nodes, b, i, d)
            (m, width), k = blank.shape, len(label)
            blanks[b, d : d + m, :width], labels[b, d : d + k, 1:width] = blank, label
            if grad:
                blanks[B + b, d : d + m, :width] = blank.flip(0, 1)
                labels[B + b, d + 1 : d + 1 + k, 1:width] = label.flip(0, 1)
    whole = sweep(ways, durations)
    total = whole[(torch.arange(B, device=device), *nodes.on(device)[:, :2].unbind(1))]
    if not grad:
        return ArcPosteriors(total)
    blank_posterior, label_posterior, duration_posterior = (
        torch.zeros_like(part)
        for part in (scores.blank_logp, scores.label_logp, scores.duration_logp)
    )
    floor = total.clamp(
        min=torch.finfo(total.dtype).min
    )  # no path at all has no share, rather than 0 / 0
    for b in range(B):
        frames, width, where = nodes.slices(b)
        alpha, beta = (
            whole[b, :frames, :width] - floor[b],
            whole[B + b, : frames + 1, :width].flip(0, 1),
        )
        for i, d in enumerate(durations):
            blank, label = leaving(scores, nodes, b, i, d)
            (m, _), k = blank.shape, len(label)
            on = (alpha[:m] + blank + beta[d : d + m]).exp().flatten()
            onward = (alpha[:k, :-1] + label + beta[d : d + k, 1:]).exp() * (
                1 + options.fastemit_lambda
            )
            onward = torch.nn.functional.pad(onward, (0, 1)).flatten()
            for share, by_token in ((on, blank_posterior), (onward, label_posterior)):
                by_token[where][: len(share)] += share
                duration_posterior[where, i][: len(share)] += share
    return ArcPosteriors(total, blank_posterior, label_posterior, duration_posterior)
