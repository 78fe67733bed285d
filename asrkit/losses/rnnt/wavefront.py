"""The transducer's lattice in plain torch: all nodes of an anti-diagonal t + u = k at once, of all
utterances at once.

The nodes of a diagonal depend on the diagonal before it only, so T U1 steps become T + U1. The
lattices are stored skewed, diagonal after diagonal, and a strided view shows them upright: nothing
is copied from one layout to the other. Backward variables are forward variables of the lattice
turned by 180 degrees: they ride along as B further lattices.

Memory beside the logits, with gradient: B T U1 V for the gradient, 16 B (T + U1) (2 U1 + 1) bytes
of lattices and one tile. Three launches a diagonal.
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


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return lattice_loss(logits, targets, nodes, options, plain, lattice)


def upright(skewed: Tensor, U1: int) -> Tensor:
    """The view (lattices, T1, U1) of lattices stored by diagonals, (T1 + U1 - 1, lattices, U1).

    Node (t, u) lies on row t + u.
    """
    diagonals, lattices, _ = skewed.shape
    to_diagonal, to_lattice, to_label = skewed.stride()
    T1 = diagonals - U1 + 1
    size = (lattices, T1, U1)
    # the next frame is on the next diagonal; the next label too, one column further
    stride = (to_lattice, to_diagonal, to_diagonal + to_label)
    return skewed.as_strided(size, stride, skewed.storage_offset())


def leaving(arcs: ArcLogProbs, nodes: Nodes, b: int) -> tuple[Tensor, Tensor]:
    """Blank `arcs` (T, U1) and label arcs (T, U) that leave the `nodes` of utterance `b`."""
    T, U1, where = nodes.slices(b)
    blank = arcs.blank_logp[where].view(T, U1)
    label = arcs.label_logp[where].view(T, U1)
    return blank, label[:, :-1]


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs have their own dtype, sums are float64. Of `options` it reads fastemit_lambda.
    """
    blank_in, label_in = _arcs_in(arcs, nodes, grad)
    sums = _forward_variables(blank_in, label_in)
    log_likelihood = final_sums(sums, nodes)
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    label_factor = 1 + options.fastemit_lambda
    total = finite(log_likelihood)
    for b in range(len(nodes.table)):
        where = nodes.slices(b)[2]
        blank, label = leaving(arcs, nodes, b)
        alpha, beta = forward_and_backward(sums, total[b], nodes, b)
        beta_after_blank = beta[1:]
        beta_after_label = beta[:-1, 1:]
        by_blank = (alpha + blank + beta_after_blank).exp()
        by_label = (alpha[:, :-1] + label + beta_after_label).exp()
        by_label = with_last_row(by_label * label_factor)
        blank_posterior[where] = by_blank.flatten().to(blank_posterior)
        label_posterior[where] = by_label.flatten().to(label_posterior)
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior)


def final_sums(sums: Tensor, nodes: Nodes) -> Tensor:
    """Log-likelihoods (B,): what `sums` (lattices, T + 1, U1) hold at the end of each lattice."""
    table = nodes.on(sums.device)
    utterance = torch.arange(len(table), device=sums.device)
    last_frame = table[:, FRAMES]
    last_row = table[:, LABELS]
    return sums[utterance, last_frame, last_row]


def finite(log_likelihood: Tensor) -> Tensor:
    """Log-likelihoods (B,) with the lowest finite number in place of -inf.

    So an utterance without any path gets posteriors of 0 rather than 0 / 0.
    """
    least = torch.finfo(log_likelihood.dtype).min
    return log_likelihood.clamp(min=least)


def forward_and_backward(
    sums: Tensor, total: Tensor, nodes: Nodes, b: int
) -> tuple[Tensor, Tensor]:
    """log alpha (T, U1) less the log-likelihood, and log beta (T + 1, U1), of utterance `b`.

    Args:
        sums: (2 B, T + 1, U1), forward variables of the lattices, then of the turned ones.
        total: () finite log-likelihood of the utterance in nats.
        nodes: of the batch.
        b: the utterance.
    """
    B = len(nodes.table)
    T, U1, _ = nodes.slices(b)
    alpha = sums[b, :T, :U1]
    turned = sums[B + b, : T + 1, :U1]
    return alpha - total, turned.flip(0, 1)


def with_last_row(by_label: Tensor) -> Tensor:
    """`by_label` (T, U) with zeros for the last lattice row, which no label leaves: (T, U1)."""
    return torch.nn.functional.pad(by_label, (0, 1))


def _arcs_in(arcs: ArcLogProbs, nodes: Nodes, grad: bool) -> tuple[Tensor, Tensor]:
    """Blank and label arcs into each node, skewed: (T + U1, B or with `grad` 2 B, U1) each.

    The second B lattices are the first turned by 180 degrees.
    """
    B = len(nodes.table)
    longest = int(nodes.table[:, FRAMES].max())
    most_rows = int(nodes.table[:, LABELS].max()) + 1
    lattices = B
    if grad:
        lattices = 2 * B  # forwards and backwards
    size = (2, longest + most_rows, lattices, most_rows)
    blank_in, label_in = arcs.blank_logp.new_full(size, -torch.inf)
    blanks = upright(blank_in, most_rows)  # (lattices, T + 1, U1): the final node is on row T
    labels = upright(label_in, most_rows)
    for b in range(B):
        T, U1, _ = nodes.slices(b)
        frames = slice(0, T)
        next_frames = slice(1, T + 1)
        blank, label = leaving(arcs, nodes, b)
        blanks[b, next_frames, :U1] = blank
        labels[b, frames, 1:U1] = label
        if grad:
            turned = B + b
            blanks[turned, next_frames, :U1] = blank.flip(0, 1)
            labels[turned, next_frames, 1:U1] = label.flip(0, 1)
    return blank_in, label_in


def _forward_variables(blank_in: Tensor, label_in: Tensor) -> Tensor:
    """log alpha of every node, float64 (lattices, T + 1, U1), from skewed arcs into the nodes."""
    diagonals, lattices, U1 = blank_in.shape
    # a first column precedes u = 0
    size = (diagonals, lattices, U1 + 1)
    sums = blank_in.new_full(size, -torch.inf, dtype=torch.float64)
    sums[0, :, 1] = 0
    nodes = sums[:, :, 1:]
    here = nodes.unbind()
    left = sums[:, :, :-1].unbind()
    blanks = blank_in.unbind()
    labels = label_in.unbind()
    for k in range(1, diagonals):
        by_blank = here[k - 1] + blanks[k]
        by_label = left[k - 1] + labels[k]
        torch.logaddexp(by_blank, by_label, out=here[k])
    return upright(nodes, U1)
