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


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs have their own dtype, sums are float64. Of `options` it reads fastemit_lambda.
    """
    lengths = nodes.table[:, :2]
    B = len(lengths)
    T, U1 = (lengths.amax(0) + lengths.new_tensor([0, 1])).tolist()
    # arcs INTO each node, skewed; upright (lattices, T + 1, U1), with the final node on row T
    size = (2, T + U1, 2 * B if grad else B, U1)
    blank_in, label_in = arcs.blank_logp.new_full(size, -torch.inf)
    blank_at = upright(blank_in, U1)
    label_at = upright(label_in, U1)
    for b in range(B):
        frames, width, where = nodes.slices(b)
        blank = arcs.blank_logp[where].view(frames, width)
        label = arcs.label_logp[where].view(frames, width)[:, :-1]
        blank_at[b, 1 : frames + 1, :width] = blank
        label_at[b, :frames, 1:width] = label
        if grad:
            blank_at[B + b, 1 : frames + 1, :width] = blank.flip(0, 1)
            label_at[B + b, 1 : frames + 1, 1:width] = label.flip(0, 1)
    sums = upright(_forward_variables(blank_in, label_in), U1)
    device = sums.device
    log_likelihood = sums[(torch.arange(B, device=device), *nodes.on(device)[:, :2].unbind(1))]
    if not grad:
        return ArcPosteriors(log_likelihood)
    blank_posterior = torch.empty_like(arcs.blank_logp)
    label_posterior = torch.empty_like(arcs.blank_logp)
    # an utterance without any path gets posteriors of 0 rather than 0 / 0
    floor = log_likelihood.clamp(min=torch.finfo(log_likelihood.dtype).min)
    for b in range(B):
        frames, width, where = nodes.slices(b)
        alpha = sums[b, :frames, :width] - floor[b]
        beta = sums[B + b, : frames + 1, :width].flip(0, 1)
        by_blank = (alpha + blank_at[b, 1 : frames + 1, :width] + beta[1:]).exp()
        by_label = (alpha[:, :-1] + label_at[b, :frames, 1:width] + beta[:-1, 1:]).exp()
        by_label = torch.nn.functional.pad(by_label * (1 + options.fastemit_lambda), (0, 1))
        blank_posterior[where] = by_blank.flatten().to(blank_posterior)
        label_posterior[where] = by_label.flatten().to(label_posterior)
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior)


def _forward_variables(blank_in: Tensor, label_in: Tensor) -> Tensor:
    """log alpha of every node, float64, skewed as the arcs into it: (T + U1, lattices, U1)."""
    diagonals, lattices, U1 = blank_in.shape
    # a first column precedes u = 0
    sums = blank_in.new_full((diagonals, lattices, U1 + 1), -torch.inf, dtype=torch.float64)
    sums[0, :, 1] = 0
    here = sums[:, :, 1:].unbind()
    left = sums[:, :, :-1].unbind()
    arcs_in = zip(blank_in[1:].unbind(), label_in[1:].unbind(), strict=True)
    for k, (blank, label) in enumerate(arcs_in):
        torch.logaddexp(here[k] + blank, left[k] + label, out=here[k + 1])
    return sums[:, :, 1:]
