"""The transducer's lattice in plain torch: all nodes of an anti-diagonal t + u = k at once, of all
utterances at once.

The nodes of a diagonal depend on the diagonal before it only, so T U1 steps become T + U1. The
lattices lie skewed, diagonal after diagonal, and a strided view stands them upright again: nothing
is copied from one layout to the other. Backward variables are forward variables of the lattice
turned by 180 degrees: they ride along as B further rows. Memory beside the logits, with gradient: B
T U1 V for the gradient, 16 B (T + U1) (2 U1 + 1) bytes of lattices and one tile. Three launches a
diagonal.
"""

import torch
from torch import Tensor

from asrkit.losses.gradient import lattice_loss
from asrkit.losses.logit_rows import plain
from asrkit.losses.nodes import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    return lattice_loss(logits, targets, nodes, options, plain, lattice)


def upright(skewed: Tensor, U1: int) -> Tensor:
    """The view (N, T1, U1) of lattices stored by diagonals, (T1 + U1 - 1, N, U1): node (t, u) lies
    on row t + u.
    """
    k, n, u = skewed.stride()
    size = skewed.shape[1], skewed.shape[0] - U1 + 1, U1
    return skewed.as_strided(size, (n, k, k + u), skewed.storage_offset())


def lattice(
    scores: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """Log-likelihoods and shares by anti-diagonals; arcs in the dtype of the scores, sums in
    float64.
    """
    lengths, (B, _) = nodes.table[:, :2], nodes.table.shape
    T, U1 = (lengths.amax(0) + lengths.new_tensor([0, 1])).tolist()
    rows = 2 * B if grad else B
    stay, emit = scores.blank_logp.new_full(
        (2, T + U1, rows, U1), -torch.inf
    )  # blank and label arcs INTO each node
    stays, emits = (
        upright(stay, U1),
        upright(emit, U1),
    )  # (rows, T + 1, U1): row T holds the final node (T, U)
    for b in range(B):
        frames, width, where = nodes.slices(b)
        blank_posterior, label_posterior = (
            stays[b, 1 : frames + 1, :width],
            emits[b, :frames, 1:width],
        )
        blank_posterior.copy_(scores.blank_logp[where].view(frames, width))
        label_posterior.copy_(scores.label_logp[where].view(frames, width)[:, :-1])
        if grad:
            stays[B + b, 1 : frames + 1, :width] = blank_posterior.flip(0, 1)
            emits[B + b, 1 : frames + 1, 1:width] = label_posterior.flip(0, 1)
    sums = scores.blank_logp.new_full(
        (T + U1, rows, U1 + 1), -torch.inf, dtype=torch.float64
    )  # first column: what precedes u = 0
    sums[0, :, 1] = 0
    here, left = sums[:, :, 1:].unbind(), sums[:, :, :-1].unbind()
    for k, (blanks, labels) in enumerate(zip(stay[1:].unbind(), emit[1:].unbind(), strict=True)):
        torch.logaddexp(here[k] + blanks, left[k] + labels, out=here[k + 1])
    whole = upright(sums[:, :, 1:], U1)
    total = whole[(torch.arange(B, device=sums.device), *nodes.on(sums.device)[:, :2].unbind(1))]
    if not grad:
        return ArcPosteriors(total)
    blank_posterior, label_posterior = (
        torch.empty_like(scores.blank_logp),
        torch.empty_like(scores.blank_logp),
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
        blank_posterior[where] = (
            (alpha + stays[b, 1 : frames + 1, :width] + beta[1:])
            .exp()
            .flatten()
            .to(blank_posterior)
        )
        onward = (alpha[:, :-1] + emits[b, :frames, 1:width] + beta[:-1, 1:]).exp() * (
            1 + options.fastemit_lambda
        )
        label_posterior[where] = (
            torch.nn.functional.pad(onward, (0, 1)).flatten().to(label_posterior)
        )
    return ArcPosteriors(total, blank_posterior, label_posterior)
