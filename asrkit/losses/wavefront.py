"""The losses in plain torch, on any device and in any floating type.

The passes over the logits work tile by tile, so that no second tensor of their size is allocated.
The lattice computes all nodes of an anti-diagonal t + u = k at once, for all utterances at once. A
node needs nodes of earlier diagonals only, so T U1 steps become T + U1. The lattices are stored
skewed, diagonal after diagonal, and a strided view shows them upright without a copy. Backward
variables are the forward variables of the lattice turned by 180 degrees, so they are computed
together with the forward variables, as B further lattices.

Memory in addition to the logits, with gradient: their gradient, one tile, and 8 B (T + U1)
((A + 2) U1 + 2) bytes of lattices, for A kinds of arcs (2 for RNN-T, two for each duration of TDT).
Each diagonal takes two launches for each kind, less one.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.losses.lattice import (
    FRAMES,
    LABELS,
    TINY,
    ArcLogProbs,
    ArcPosteriors,
    LatticeOptions,
    Nodes,
    Saved,
)


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Return the arc log-probabilities of all `nodes`, (N,) each."""
    n = len(options.durations)
    V = logits.shape[-1] - n
    arcs = ArcLogProbs.empty(logits, nodes, n)
    for b in range(len(nodes.table)):
        for where, tile in _tiles(nodes, b, logits):
            tokens = tile[..., :V].to(arcs.log_z.dtype)  # (frames, U1, V)
            z = torch.zeros_like(tokens[..., 0])
            if options.fused_log_softmax:
                z = tokens.logsumexp(-1)
            # infinite logits have no softmax, so the loss must not be finite
            z.masked_fill_(z.isinf(), torch.nan)
            at_label = tokens[:, :-1].gather(-1, _labels(tile, targets[b]))[..., 0]
            arcs.log_z[where] = z.flatten()
            arcs.blank_logp[where] = (tokens[..., options.blank] - z).flatten()
            by_row = arcs.label_logp[where].view(z.shape)
            by_row[:, :-1] = at_label - z[:, :-1]
            by_row[:, -1] = -torch.inf
            if n:
                logps = tile[..., V:].log_softmax(-1, dtype=z.dtype)
                arcs.duration_logp[where] = logps.flatten(0, 1)
    return arcs


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over all of `out`, padding included (0 there).

    Args:
        logits: The logits of the forward pass.
        out: The output, a tensor like `logits` or `logits` itself.
        targets: (B, U), int64.
        nodes: Positions of the nodes in `logits`.
        options: Options of the loss. The caller applies `clamp`.
        saved: What forward saved.
        incoming: Gradient over the losses, (B,).
    """
    for b in range(len(nodes.table)):
        grid = nodes.grid(out, b)
        T, U1, _ = nodes.slices(b)
        grid[T:].zero_()
        grid[:T, U1:].zero_()
        for where, tile, out_tile in _tiles(nodes, b, logits, out):
            grad = _tile_gradient(tile, where, targets[b], options, saved)
            grad.mul_(incoming[b])
            if not grad.is_cuda:
                grad = torch.hardshrink(grad, TINY)
            out_tile.copy_(grad)


def _tile_gradient(
    tile: Tensor, where: slice, targets: Tensor, options: LatticeOptions, saved: Saved
) -> Tensor:
    """Return the gradient over the logits of a tile, (frames, U1, V + n), at the nodes `where`."""
    tokens = tile[..., : tile.shape[-1] - len(options.durations)]
    size = tile.shape[:2]
    blank_posterior = saved.blank_posterior[where].view(size)
    label_posterior = saved.label_posterior[where].view(size)
    if options.fused_log_softmax:
        z = saved.log_z[where].view(*size, 1)
        posterior = blank_posterior + label_posterior
        grad = (tokens.to(z.dtype) - z).exp_().mul_(posterior[..., None])
    else:
        grad = torch.zeros_like(tokens, dtype=blank_posterior.dtype)
    grad[..., options.blank] -= blank_posterior
    by_label = -label_posterior[:, :-1, None]
    grad[:, :-1].scatter_add_(-1, _labels(tile, targets), by_label)
    if options.durations:
        by_duration = saved.duration_gradient[where].view(*size, -1)
        grad = torch.cat((grad, by_duration), -1)
    return grad


def _tiles(nodes: Nodes, b: int, *tensors: Tensor) -> Iterator[Any]:
    """Yield tiles of a few frames of utterance b.

    Each tile is the slice of its nodes, then the tile's part of each tensor, (frames, U1, V).
    """
    T, U1, places = nodes.slices(b)
    grids = [nodes.grid(tensor, b)[:T, :U1] for tensor in tensors]
    # on a GPU a tile is large, for few launches; on a CPU it fits a core's cache
    tile_bytes = 1 << 20 if grids[0].device.type == "cpu" else 1 << 28
    step = max(1, tile_bytes // (4 * grids[0][0].numel()))
    for t in range(0, T, step):
        stop = min(t + step, T)
        where = slice(places.start + t * U1, places.start + stop * U1)
        yield where, *(grid[t:stop] for grid in grids)


def _labels(tile: Tensor, targets: Tensor) -> Tensor:
    """Return the next label of every node that has one, as an index: (frames, U, 1)."""
    frames, U1, _ = tile.shape
    return targets[: U1 - 1].expand(frames, U1 - 1)[..., None]


class ArcKind(NamedTuple):
    """A kind of arc, from node (t, u) to (t + frames, u + labels), with the i-th duration."""

    frames: int
    labels: int
    i: int


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Return log-likelihoods and, with `grad`, posteriors of the `arcs`.

    Arcs keep their dtype; sums are float64. It reads `durations` and `fastemit_lambda` from
    `options`.
    """
    kinds = []
    for i, (blank_frames, label_frames) in enumerate(options.steps(nodes.longest[0])):
        if blank_frames:
            kinds.append(ArcKind(blank_frames, 0, i))
        kinds.append(ArcKind(label_frames, 1, i))
    sums = sweep(_arcs_in(arcs, nodes, kinds, grad), kinds)
    table = nodes.on(sums.device)
    B = len(table)
    utterance = torch.arange(B, device=sums.device)
    log_likelihood = sums[utterance, table[:, FRAMES], table[:, LABELS]]
    if not grad:
        return ArcPosteriors(log_likelihood)
    _, *logps = arcs
    blank_posterior, label_posterior, duration_posterior = map(torch.zeros_like, logps)
    # if an utterance has no path, its posteriors must be 0, not 0 / 0
    total = log_likelihood.clamp(min=torch.finfo(torch.float64).min)
    for b in range(B):
        T, U1, where = nodes.slices(b)
        alpha = sums[b, :T, :U1] - total[b]
        beta = sums[B + b, : T + 1, :U1].flip(0, 1)
        for kind in kinds:
            arc = arcs_out(arcs, nodes, b, kind)
            m, width = arc.shape
            landing = beta[kind.frames : kind.frames + m, kind.labels : kind.labels + width]
            by_arc = (alpha[:m, :width] + arc + landing).exp()
            posterior = blank_posterior
            if kind.labels:
                by_arc *= 1 + options.fastemit_lambda
                posterior = label_posterior
            posterior[where].view(T, U1)[:m, :width] += by_arc
            if options.durations:
                duration_posterior[where, kind.i].view(T, U1)[:m, :width] += by_arc
    return ArcPosteriors(log_likelihood, blank_posterior, label_posterior, duration_posterior)


def sweep(arcs_in: Tensor, kinds: list[ArcKind]) -> Tensor:
    """Return the forward variables, float64 (lattices, T + 1, U1), from the arcs into each node.

    `arcs_in` (kinds, T + U1, lattices, U1) holds the skewed arcs of each of the `kinds`.
    """
    _, diagonals, lattices, U1 = arcs_in.shape
    reach = max(kind.frames + kind.labels for kind in kinds)
    # a first column precedes u = 0, and `reach` diagonals the first
    size = (reach + diagonals, lattices, U1 + 1)
    sums = arcs_in.new_full(size, -torch.inf, dtype=torch.float64)
    sums[reach, :, 1] = 0
    here = sums[:, :, 1:].unbind()
    left = sums[:, :, :-1].unbind()
    sources = []
    for kind, arcs in zip(kinds, arcs_in.unbind(), strict=True):
        rows = left if kind.labels else here
        sources.append((rows[reach - kind.frames - kind.labels :], arcs.unbind()))
    for k in range(1, diagonals):
        *others, last = (rows[k] + arcs[k] for rows, arcs in sources)
        torch.logaddexp(reduce(torch.logaddexp, others), last, out=here[reach + k])
    return upright(sums[reach:, :, 1:], U1)


def upright(skewed: Tensor, U1: int) -> Tensor:
    """View lattices stored by diagonals, (T1 + U1 - 1, lattices, U1), as (lattices, T1, U1).

    Node (t, u) is on diagonal t + u.
    """
    diagonals, lattices, _ = skewed.shape
    to_diagonal, to_lattice, to_label = skewed.stride()
    size = (lattices, diagonals - U1 + 1, U1)
    # the next frame is on the next diagonal; so is the next label, one column further
    stride = (to_lattice, to_diagonal, to_diagonal + to_label)
    return skewed.as_strided(size, stride, skewed.storage_offset())


def arcs_out(arcs: ArcLogProbs, nodes: Nodes, b: int, kind: ArcKind) -> Tensor:
    """Return the log-probabilities (frames, rows) of arcs of one kind inside utterance b's lattice.

    The lattice ends at (T, U), which only a blank may enter.
    """
    T, U1, where = nodes.slices(b)
    logp = (arcs.label_logp if kind.labels else arcs.blank_logp)[where]
    if arcs.duration_logp.numel():
        logp = logp + arcs.duration_logp[where, kind.i]
    frames = max(T + 1 - kind.labels - kind.frames, 0)
    return logp.view(T, U1)[:frames, : U1 - kind.labels]


def _arcs_in(arcs: ArcLogProbs, nodes: Nodes, kinds: list[ArcKind], grad: bool) -> Tensor:
    """Return the arcs into each node, skewed: (kinds, T + U1, lattices, U1).

    There are B lattices. With `grad` there are 2 B, the second half turned by 180 degrees.
    """
    B = len(nodes.table)
    T, U1 = nodes.longest
    size = (len(kinds), T + U1, 2 * B if grad else B, U1)
    arcs_in = arcs.blank_logp.new_full(size, -torch.inf)
    for kind, skewed in zip(kinds, arcs_in, strict=True):
        lattices = upright(skewed, U1)
        for b in range(B):
            arc = arcs_out(arcs, nodes, b, kind)
            m, width = arc.shape
            rows = slice(kind.labels, kind.labels + width)
            lattices[b, kind.frames : kind.frames + m, rows] = arc
            if grad:
                first = kind.frames + kind.labels
                lattices[B + b, first : first + m, rows] = arc.flip(0, 1)
    return arcs_in
