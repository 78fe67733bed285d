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
from asrkit.losses.nodes import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return lattice_loss(logits, targets, nodes, options, plain, lattice)


def upright(skewed: Tensor, U1: int) -> Tensor:
    """The view (lattices, T1, U1) of lattices stored by diagonals, (T1 + U1 - 1, lattices, U1).

    Node (t, u) lies on row t + u.
    """
    diagonal, lattice, label = skewed.stride()
    size = skewed.shape[1], skewed.shape[0] - U1 + 1, U1
    return skewed.as_strided(size, (lattice, diagonal, diagonal + label), skewed.storage_offset())


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
    B = len(nodes.table)
    sums = _forward_variables(*_arcs_in(arcs, nodes, grad))
    last_frame, last_row = nodes.on(sums.device)[:, :2].unbind(1)
    log_likelihood = sums[torch.arange(B, device=sums.device), last_frame, last_row]
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    # an utterance without any path gets posteriors of 0 rather than 0 / 0
    floor = log_likelihood.clamp(min=torch.finfo(log_likelihood.dtype).min)
    for b in range(B):
        T, U1, where = nodes.slices(b)
        blank, label = leaving(arcs, nodes, b)
        alpha = sums[b, :T, :U1] - floor[b]
        beta = sums[B + b, : T + 1, :U1].flip(0, 1)
        by_blank = (alpha + blank + beta[1:]).exp()
        by_label = (alpha[:, :-1] + label + beta[:-1, 1:]).exp()
        by_label = torch.nn.functional.pad(by_label * (1 + options.fastemit_lambda), (0, 1))
        blank_posterior[where] = by_blank.flatten().to(blank_posterior)
        label_posterior[where] = by_label.flatten().to(label_posterior)
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior)


def _arcs_in(arcs: ArcLogProbs, nodes: Nodes, grad: bool) -> tuple[Tensor, Tensor]:
    """Blank and label arcs into each node, skewed: (T + U1, B or with `grad` 2 B, U1) each.

    The second B lattices are the first turned by 180 degrees.
    """
    B = len(nodes.table)
    longest, most_labels = nodes.table[:, :2].amax(0).tolist()
    most_rows = most_labels + 1
    lattices = B
    if grad:
        lattices = 2 * B  # forwards and backwards
    size = (2, longest + most_rows, lattices, most_rows)
    blank_in, label_in = arcs.blank_logp.new_full(size, -torch.inf)
    blanks = upright(blank_in, most_rows)  # (lattices, T + 1, U1): the final node is on row T
    labels = upright(label_in, most_rows)
    for b in range(B):
        T, U1, _ = nodes.slices(b)
        blank, label = leaving(arcs, nodes, b)
        blanks[b, 1 : T + 1, :U1] = blank
        labels[b, :T, 1:U1] = label
        if grad:
            blanks[B + b, 1 : T + 1, :U1] = blank.flip(0, 1)
            labels[B + b, 1 : T + 1, 1:U1] = label.flip(0, 1)
    return blank_in, label_in


def _forward_variables(blank_in: Tensor, label_in: Tensor) -> Tensor:
    """log alpha of every node, float64 (lattices, T + 1, U1), from skewed arcs into the nodes."""
    diagonals, lattices, U1 = blank_in.shape
    # a first column precedes u = 0
    sums = blank_in.new_full((diagonals, lattices, U1 + 1), -torch.inf, dtype=torch.float64)
    sums[0, :, 1] = 0
    here = sums[:, :, 1:].unbind()
    left = sums[:, :, :-1].unbind()
    arcs_in = zip(blank_in[1:].unbind(), label_in[1:].unbind(), strict=True)
    for k, (blank, label) in enumerate(arcs_in):
        torch.logaddexp(here[k] + blank, left[k] + label, out=here[k + 1])
    return upright(sums[:, :, 1:], U1)
