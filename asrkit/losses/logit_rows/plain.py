"""Both passes over the logits in plain torch, on any device: tile by tile, so that no second tensor
of their size is made.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from asrkit.losses.gradient import Saved
from asrkit.losses.nodes import ArcLogProbs, LatticeOptions, Nodes

# smaller gradients become 0 on a CPU, whose products are slow below float32's normal range
TINY = 1e-35


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Arc log-probabilities of all `nodes`, (N,) each, from `logits`, `targets` and `options`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    n = len(options.durations)
    log_z, blank_logp, label_logp = logits.new_zeros((3, nodes.count), dtype=dtype).unbind()
    duration_logp = None
    if n:
        duration_logp = logits.new_empty((nodes.count, n), dtype=dtype)
    for b in range(len(nodes.table)):
        grid = nodes.grid(logits, b)
        for tile, where in _tiles(grid, nodes, b):
            V = tile.shape[-1] - n
            tokens = tile[..., :V].to(dtype)  # (frames, U1, V)
            z = _log_normaliser(tokens, options)
            at_blank = tokens[..., options.blank]
            labels = _labels(tile, targets[b])
            at_label = tokens[:, :-1].gather(-1, labels)[..., 0]
            log_z[where] = z.flatten()
            blank_logp[where] = (at_blank - z).flatten()
            label_logp[where] = -torch.inf  # stays on the last row
            by_row = label_logp[where].view(z.shape)
            by_row[:, :-1] = at_label - z[:, :-1]
            if duration_logp is not None:
                logps = tile[..., V:].log_softmax(-1, dtype=dtype)
                duration_logp[where] = logps.flatten(0, 1)
    return ArcLogProbs(log_z, blank_logp, label_logp, duration_logp)


def _log_normaliser(tokens: Tensor, options: LatticeOptions) -> Tensor:
    """log of the sum of exp over the tokens (frames, U1, V); 0 if they are log-probabilities."""
    if options.fused_log_softmax:
        z = tokens.logsumexp(-1)
    else:
        z = torch.zeros_like(tokens[..., 0])
    # infinite logits have no softmax; they must not pass for a finite loss
    return z.masked_fill_(z.isinf(), torch.nan)


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over the `logits` into all of `out`.

    Takes logits, out, targets, nodes, options, saved and incoming as
    asrkit.losses.gradient.LogitRows says.
    """
    out_nodes = nodes.strided_like(out)
    for b in range(len(nodes.table)):
        grid = out_nodes.grid(out, b)
        T, U1, _ = nodes.slices(b)
        grid[T:].zero_()
        grid[:T, U1:].zero_()
        tiles = _tiles(nodes.grid(logits, b), nodes, b)
        out_tiles = _tiles(grid, nodes, b)
        for (tile, where), (out_tile, _) in zip(tiles, out_tiles, strict=True):
            grad = _tile_gradient(tile, where, targets[b], options, saved)
            grad.mul_(incoming[b])
            if not grad.is_cuda:
                grad = torch.hardshrink(grad, TINY)
            out_tile.copy_(grad)


def _tile_gradient(
    tile: Tensor, where: slice, targets: Tensor, options: LatticeOptions, saved: Saved
) -> Tensor:
    """Gradient over a tile (frames, U1, V + n) of the nodes `where`, clamped."""
    n = len(options.durations)
    V = tile.shape[-1] - n
    size = tile.shape[:2]
    tokens = tile[..., :V]
    blank_posterior = saved.blank_posterior[where].view(size)
    label_posterior = saved.label_posterior[where].view(size)
    dtype = blank_posterior.dtype
    if options.fused_log_softmax:
        z = saved.log_z[where].view(size)
        softmax = (tokens.to(dtype) - z[..., None]).exp_()
        posterior = blank_posterior + label_posterior
        grad = softmax.mul_(posterior[..., None])
    else:
        grad = torch.zeros_like(tokens, dtype=dtype)
    grad[..., options.blank] -= blank_posterior
    labels = _labels(tile, targets)
    by_label = -label_posterior[:, :-1, None]
    grad[:, :-1].scatter_add_(-1, labels, by_label)
    if n:
        assert saved.duration_gradient is not None
        by_duration = saved.duration_gradient[where].view(*size, n)
        grad = torch.cat((grad, by_duration), -1)
    if options.clamp > 0:
        grad.clamp_(-options.clamp, options.clamp)
    return grad


def _tiles(grid: Tensor, nodes: Nodes, b: int) -> Iterator[tuple[Tensor, slice]]:
    """Some frames at a time of a grid's valid part, (frames, U1, V), and the slice of its nodes."""
    T, U1, places = nodes.slices(b)
    tile_bytes = 1 << 28  # large enough for few launches on a GPU
    if grid.device.type == "cpu":
        tile_bytes = 1 << 20  # fits a core's cache
    frame_bytes = 4 * U1 * grid.shape[-1]
    step = max(1, tile_bytes // frame_bytes)
    for t in range(0, T, step):
        stop = min(t + step, T)
        first = places.start + t * U1
        last = places.start + stop * U1
        yield grid[t:stop, :U1], slice(first, last)


def _labels(tile: Tensor, targets: Tensor) -> Tensor:
    """The next label of every node that has one, as an index: (frames, U, 1)."""
    frames, U1, _ = tile.shape
    U = U1 - 1
    return targets[:U].expand(frames, U)[..., None]
