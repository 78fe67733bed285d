"""The neighbours' frames at the edges of a part, and their gradients on the way home."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asrkit.parallel.groups import Messages, Place, place_in
from asrkit.shapes import expect, whole


def halo(x: Tensor, left: int, right: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """`x` with the last `left` frames of the part before it and the first `right` of the one after.

    (..., T) becomes (..., left + T + right); at both ends of the whole there are zeros. Backward
    adds to each frame the gradients that the neighbours have over their copies of it. All ranks
    have to call this, and its backward, in the same order.

    Args:
        x: This rank's part (..., T).
        left: Frames from the rank before, at most T.
        right: Frames from the rank after, at most T.
        group: The ranks, in the order of their parts; None for all processes.

    Raises:
        ValueError: The halo is wider than the part, or the group has one rank.
    """
    place = place_in(group, "torch.nn.functional.pad")
    check_halo(x, left, right)
    before, after = Edges.apply(x, start(x, left, right, place, group))
    return torch.cat((before, x, after), -1)


def check_halo(x: Tensor, left: int, right: int) -> None:
    """Raise ValueError where a part `x` cannot give its neighbours `left` and `right` frames."""
    for name, frames in (("left", left), ("right", right)):
        expect(whole(frames, 0), name, "a number of frames, at least 0", repr(frames))
    T = x.shape[-1]
    wanted = f"a part as long as its halo, {max(left, right)} frames"
    expect(max(left, right) <= T, "x", wanted, T, "Split over fewer ranks.")


class Pending:
    """The edges of two neighbours, of which `messages` tells when they are there.

    Args:
        x: This rank's part (..., T).
        left: Frames from the rank before.
        right: Frames from the rank after.
        place: This rank's.
        group: The ranks.
    """

    def __init__(
        self, x: Tensor, left: int, right: int, place: Place, group: dist.ProcessGroup | None
    ) -> None:
        self.place = place
        self.group = group
        self.before = x.new_zeros((*x.shape[:-1], left))
        self.after = x.new_zeros((*x.shape[:-1], right))
        self.messages = Messages(group)


def start(
    x: Tensor, left: int, right: int, place: Place, group: dist.ProcessGroup | None
) -> Pending:
    """Begin to exchange edges with both neighbours.

    Args:
        x: This rank's part (..., T).
        left: Frames from the rank before.
        right: Frames from the rank after.
        place: This rank's.
        group: The ranks.
    """
    pending = Pending(x.detach(), left, right, place, group)
    T = x.shape[-1]
    if not place.is_first:
        pending.messages.send(x[..., :right], place.rank - 1)
        pending.messages.receive(pending.before, place.rank - 1)
    if not place.is_last:
        pending.messages.send(x[..., T - left :], place.rank + 1)
        pending.messages.receive(pending.after, place.rank + 1)
    pending.messages.start()
    return pending


class Edges(torch.autograd.Function):
    """The edges (..., left) and (..., right) of the neighbours, once they are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> tuple[Tensor, Tensor]:
        """Wait for the `pending` edges; `x` is the part whose own edges were sent.

        `ctx` keeps for backward whose they are.
        """
        pending.messages.wait()
        ctx.place = pending.place
        ctx.group = pending.group
        ctx.shape = x.shape
        return pending.before, pending.after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients over both edges home, and add those that come from the neighbours."""
        by_before, by_after = grads
        place = ctx.place
        left = by_before.shape[-1]
        right = by_after.shape[-1]
        for_first = by_after.new_zeros(by_after.shape)
        for_last = by_before.new_zeros(by_before.shape)
        messages = Messages(ctx.group)
        if not place.is_first:
            messages.send(by_before, place.rank - 1)
            messages.receive(for_first, place.rank - 1)
        if not place.is_last:
            messages.send(by_after, place.rank + 1)
            messages.receive(for_last, place.rank + 1)
        messages.start().wait()
        grad = by_before.new_zeros(ctx.shape)
        T = ctx.shape[-1]
        grad[..., :right] += for_first
        grad[..., T - left :] += for_last
        return grad, None
