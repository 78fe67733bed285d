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
    """Scores of all nodes, (N,) each."""
    dtype, n = torch.promote_types(logits.dtype, torch.float32), len(options.durations)
    z, stay, emit = logits.new_zeros((3, nodes.count), dtype=dtype).unbind()
    durations = logits.new_empty((nodes.count, n), dtype=dtype) if n else None
    for b in range(len(nodes.table)):
        for tile, where in _tiles(nodes.grid(logits, b), nodes, b):
            tokens, labels = (
                tile[..., : tile.shape[-1] - n].to(dtype),
                _labels(tile, targets[b]),
            )  # (frames, U1, V), (frames, U, 1)
            here = (
                tokens.logsumexp(-1)
                if options.fused_log_softmax
                else torch.zeros_like(tokens[..., 0])
            )
            here.masked_fill_(
                here.isinf(), torch.nan
            )  # infinite logits have no softmax; none may pass for a finite loss
            z[where] = here.flatten()
            stay[where] = (tokens[..., options.blank] - here).flatten()
            emit[where] = -torch.inf
            emit[where].view(here.shape)[:, :-1] = (
                tokens[:, :-1].gather(-1, labels)[..., 0] - here[:, :-1]
            )
            if durations is not None:
                durations[where] = tile[..., -n:].log_softmax(-1, dtype=dtype).flatten(0, 1)
    return ArcLogProbs(z, stay, emit, durations)


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over all of `out`; see asrkit.losses.gradient.LogitRows."""
    n, own = len(options.durations), nodes.of(out)
    for b in range(len(nodes.table)):
        grid, written = nodes.grid(logits, b), own.grid(out, b)
        T, U1, _ = nodes.slices(b)
        written[T:].zero_()
        written[:T, U1:].zero_()
        for (tile, where), (place, _) in zip(
            _tiles(grid, nodes, b), _tiles(written, nodes, b), strict=True
        ):
            tokens, labels, size = (
                tile[..., : tile.shape[-1] - n],
                _labels(tile, targets[b]),
                tile.shape[:2],
            )
            blank_posterior, label_posterior = (
                saved.blank_posterior[where].view(size),
                saved.label_posterior[where].view(size),
            )
            if options.fused_log_softmax:
                grad = (
                    (tokens.to(blank_posterior.dtype) - saved.log_z[where].view(*size, 1))
                    .exp_()
                    .mul_((blank_posterior + label_posterior)[..., None])
                )
            else:
                grad = torch.zeros_like(tokens, dtype=blank_posterior.dtype)
            grad[..., options.blank] -= blank_posterior
            grad[:, :-1].scatter_add_(-1, labels, -label_posterior[:, :-1, None])
            if n:
                assert saved.duration_gradient is not None
                grad = torch.cat((grad, saved.duration_gradient[where].view(*size, n)), -1)
            if options.clamp > 0:
                grad.clamp_(-options.clamp, options.clamp)
            grad.mul_(incoming[b])
            place.copy_(grad if grad.is_cuda else torch.hardshrink(grad, TINY))


def _tiles(grid: Tensor, nodes: Nodes, b: int) -> Iterator[tuple[Tensor, slice]]:
    """The valid part of a grid by the few frames, (frames, U1, V), and the places of its nodes."""
    T, U1, places = nodes.slices(b)
    tile_bytes = (
        1 << 20 if grid.device.type == "cpu" else 1 << 28
    )  # fits a core's cache; few launches
    step = max(1, tile_bytes // (4 * U1 * grid.shape[-1]))
    for t in range(0, T, step):
        stop = min(t + step, T)
        yield grid[t:stop, :U1], slice(places.start + t * U1, places.start + stop * U1)


def _labels(tile: Tensor, targets: Tensor) -> Tensor:
    """The next label of every node that has one, as an index: (frames, U, 1)."""
    frames, U1, _ = tile.shape
    return targets[: U1 - 1].expand(frames, U1 - 1)[..., None]
