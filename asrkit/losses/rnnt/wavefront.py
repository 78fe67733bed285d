"""The transducer loss in plain torch: all nodes of an anti-diagonal t + u = k at once, of all utterances at once.

The nodes of a diagonal depend on the diagonal before it only, so T U1 steps become T + U1. The lattices lie skewed,
diagonal after diagonal, and a strided view stands them upright again: nothing is copied from one layout to the other.
Backward variables are forward variables of the lattice turned by 180 degrees: they ride along as B further rows.
Memory beside the logits, with gradient: B T U1 V for the gradient, 16 B (T + U1) (2 U1 + 1) bytes of lattices
and one tile. The softmax is formed tile by tile, and again in the backward pass. Three launches a diagonal.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from asrkit.losses.rnnt.reference import refuse_second_derivative


def losses(
    logits: Tensor, targets: Tensor, lengths: Tensor, blank: int, clamp: float, fused_log_softmax: bool, fastemit_lambda: float
) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments (`lengths` (B, 2): frames, labels, on the host)."""
    return _Wavefront.apply(logits, targets, lengths, blank, clamp, fused_log_softmax, fastemit_lambda)


def _upright(skewed: Tensor, U1: int) -> Tensor:
    """The view (N, T1, U1) of lattices stored by diagonals, (T1 + U1 - 1, N, U1): node (t, u) lies on row t + u."""
    k, n, u = skewed.stride()
    size = skewed.shape[1], skewed.shape[0] - U1 + 1, U1
    return skewed.as_strided(size, (n, k, k + u), skewed.storage_offset())


def _tiles(logits: Tensor, targets: Tensor, T: int, U: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """One utterance's valid logits by the few frames: which, tile (frames, U1, V), label indices (frames, U, 1)."""
    tile_bytes = 1 << 20 if logits.device.type == "cpu" else 1 << 28  # fits a core's cache; few launches
    step = max(1, tile_bytes // (4 * (U + 1) * logits.shape[-1]))
    for t in range(0, T, step):
        tile = logits[t : min(t + step, T), : U + 1]
        yield slice(t, t + len(tile)), tile, targets[:U].expand(len(tile), U)[..., None]


class _Wavefront(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, lengths, blank, clamp, fused, fastemit_lambda):
        B, T, U1, _ = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        N = 2 * B if ctx.needs_input_grad[0] else B
        stay, emit = logits.new_full((2, T + U1, N, U1), -torch.inf, dtype=dtype)  # blank and label arcs INTO each node
        stays, emits = _upright(stay, U1), _upright(emit, U1)  # (N, T + 1, U1): row T holds the final node (T, U)
        for b, (frames, U) in enumerate(lengths.tolist()):
            by_blank, by_label = stays[b, 1 : frames + 1, : U + 1], emits[b, :frames, 1 : U + 1]
            for where, tile, index in _tiles(logits[b], targets[b], frames, U):
                logp = tile.log_softmax(-1, dtype=dtype) if fused else tile
                by_blank[where] = logp[..., blank]
                by_label[where] = logp[:, :U].gather(-1, index)[..., 0]
            if N > B:
                stays[B + b, 1 : frames + 1, : U + 1] = by_blank.flip(0, 1)
                emits[B + b, 1 : frames + 1, 1 : U + 1] = by_label.flip(0, 1)
        nodes = logits.new_full((T + U1, N, U1 + 1), -torch.inf, dtype=torch.float64)  # first column: what precedes u = 0
        nodes[0, :, 1] = 0
        here, left = nodes[:, :, 1:].unbind(), nodes[:, :, :-1].unbind()
        for k, (blanks, labels) in enumerate(zip(stay[1:].unbind(), emit[1:].unbind(), strict=True)):
            torch.logaddexp(here[k] + blanks, left[k] + labels, out=here[k + 1])
        ends = (torch.arange(B, device=logits.device), *lengths.to(logits.device).unbind(1))
        total = _upright(nodes[:, :, 1:], U1)[ends]
        ctx.save_for_backward(logits, targets, stay, emit, nodes, total)
        ctx.rest = lengths, blank, clamp, fused, fastemit_lambda
        return -total.to(dtype)

    @staticmethod
    def backward(ctx, incoming):
        refuse_second_derivative()
        logits, targets, stay, emit, nodes, total = ctx.saved_tensors
        lengths, blank, clamp, fused, fastemit_lambda = ctx.rest
        B, _, U1, _ = logits.shape
        stays, emits, nodes = (_upright(part, U1) for part in (stay, emit, nodes[:, :, 1:]))
        total = total.clamp(min=torch.finfo(total.dtype).min)  # no path at all has no share, rather than 0 / 0
        grads = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        for b, (frames, U) in enumerate(lengths.tolist()):
            alpha, beta = nodes[b, :frames, : U + 1], nodes[B + b, : frames + 1, : U + 1].flip(0, 1)
            after, inner = (incoming[b], 1) if clamp > 0 else (1, incoming[b])  # clamp, then scale
            by_blank = (alpha + stays[b, 1 : frames + 1, : U + 1] + beta[1:] - total[b]).exp().to(stay.dtype) * inner
            by_label = (alpha[:, :U] + emits[b, :frames, 1 : U + 1] + beta[:-1, 1:] - total[b]).exp().to(stay.dtype)
            by_label *= (1 + fastemit_lambda) * inner
            either = torch.nn.functional.pad(by_label, (0, 1)) + by_blank
            for where, tile, index in _tiles(logits[b], targets[b], frames, U):
                grad = tile.softmax(-1, dtype=stay.dtype) if fused else torch.zeros_like(tile, dtype=stay.dtype)
                grad *= either[where, :, None]
                grad[..., blank] -= by_blank[where]
                grad[:, :U].scatter_add_(-1, index, -by_label[where, :, None])
                grads[b, where, : U + 1] = grad.clamp_(-clamp, clamp).mul_(after) if clamp > 0 else grad
        return grads, None, None, None, None, None, None
