"""An LSTM whose frames are split over ranks: its layers run as a wavefront over the parts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.parallel.groups import Messages, Place, place_in
from asrkit.shapes import expect


def time_wavefront(lstm: nn.LSTM, chunk: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of the LSTM's output over the whole: (T, B, D), or (B, T, D).

    Layer l of a part needs layer l - 1 of that part, and the state that layer l has at the end of
    the part before. So rank r works on layer l while rank r + 1 works on layer l - 1: with equal
    parts on R ranks, L layers take (L + R - 1) / (L R) of the steps that one process takes.
    All ranks have to call this, and its backward, in the same order. Weights get the gradient of
    this rank's part; its sum over the ranks is that of the whole.

    Args:
        lstm: Of one direction, with the same weights on every rank.
        chunk: This rank's frames (T, B, F), or (B, T, F) with batch_first.
        group: The ranks, in the order of their parts; None for all processes.

    Raises:
        ValueError: An LSTM of two directions or with projections, or a group of one rank.
    """
    place = place_in(group, "the LSTM itself")
    one_way = not lstm.bidirectional and lstm.proj_size == 0
    expect(one_way, "lstm", "one direction and no projection", lstm)
    expect(chunk.dim() == 3, "chunk", "shape (T, B, F) or (B, T, F)", tuple(chunk.shape))
    batch_dimension = 1
    if lstm.batch_first:
        batch_dimension = 0
    B = chunk.shape[batch_dimension]
    zeros = chunk.new_zeros(1, B, lstm.hidden_size)
    sending = list[Messages]()
    frames = chunk
    for layer in range(lstm.num_layers):
        weights = list[Tensor](lstm.all_weights[layer])
        asks = next((tensor for tensor in (frames, *weights) if tensor.requires_grad), frames)
        state = FromBefore.apply(asks, zeros, place, group)
        frames, *after = torch.lstm(
            frames, state, weights, lstm.bias, 1, 0.0, lstm.training, False, lstm.batch_first
        )
        frames = ToAfter.apply(frames, *after, place, group, sending)
        if layer < lstm.num_layers - 1:
            frames = F.dropout(frames, lstm.dropout, lstm.training)
    for messages in sending:
        messages.wait()
    return frames


class FromBefore(torch.autograd.Function):
    """State (1, B, D) and cell at the end of the part before; zeros on the first rank."""

    @staticmethod
    def forward(
        ctx: Any, asks: Tensor, zeros: Tensor, place: Place, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Receive both.

        Args:
            ctx: Of autograd.
            asks: Only tells autograd that the gradient over both is wanted.
            zeros: What both are on the first rank, (1, B, D).
            place: This rank's.
            group: The ranks.
        """
        ctx.place = place
        ctx.group = group
        both = torch.stack((zeros, zeros))
        if not place.is_first:
            messages = Messages(group)
            messages.receive(both, place.rank - 1)
            messages.start().wait()
        return both[0].clone(), both[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients over both to the rank that made them."""
        if not ctx.place.is_first:
            messages = Messages(ctx.group)
            messages.send(torch.stack(grads), ctx.place.rank - 1)
            messages.start().wait()
        return None, None, None, None


class ToAfter(torch.autograd.Function):
    """The output as it is; state and cell go to the rank behind, their gradients come from it."""

    @staticmethod
    def forward(
        ctx: Any,
        frames: Tensor,
        state: Tensor,
        cell: Tensor,
        place: Place,
        group: dist.ProcessGroup | None,
        sending: list[Messages],
    ) -> Tensor:
        """Start to send the state and the cell.

        Args:
            ctx: Of autograd.
            frames: Output of the layer, which is returned.
            state: Hidden state after this part, (1, B, D).
            cell: Cell after this part, (1, B, D).
            place: This rank's.
            group: The ranks.
            sending: Gets the message, which has to be waited for.
        """
        ctx.place = place
        ctx.group = group
        ctx.like = torch.stack((state, cell))
        if not place.is_last:
            messages = Messages(group)
            messages.send(ctx.like, place.rank + 1)
            sending.append(messages.start())
        return frames.view_as(frames)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Receive the gradients over state and cell; none on the last rank."""
        by_state = torch.zeros_like(ctx.like)
        if not ctx.place.is_last:
            messages = Messages(ctx.group)
            messages.receive(by_state, ctx.place.rank + 1)
            messages.start().wait()
        return grads[0], by_state[0], by_state[1], None, None, None
