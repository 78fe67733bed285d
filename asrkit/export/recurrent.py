"""LSTM layers that an exporter can follow.

torch.export computes `nn.LSTM` frame by frame, so that its program holds for one number of frames
only. A layer here is one op, which ONNX has as well.
"""

from typing import Any

import torch
from torch import Tensor, nn

# ONNX orders the gates input, output, forget, cell; torch: input, forget, cell, output.
TO_ONNX = (0, 3, 1, 2)


@torch.library.custom_op("asrkit::lstm_layer", mutates_args=())
def lstm_layer(x: Tensor, weight: Tensor, recurrence: Tensor, bias: Tensor) -> Tensor:
    """Hidden states (T, B, D) of one LSTM layer that starts from zeros.

    Args:
        x: Frames (T, B, C).
        weight: Of the frames (1, 4 D, C), gates in ONNX's order, as all weights here.
        recurrence: Of the last hidden state (1, 4 D, D).
        bias: Of both (1, 8 D).
    """
    D = recurrence.shape[2]
    of_frames, of_states = bias[0].split(4 * D)
    parts = (weight[0], recurrence[0], of_frames, of_states)
    weights = [_gates(part, D, _inverse(TO_ONNX)) for part in parts]
    start = x.new_zeros(1, x.shape[1], D)
    hidden, _, _ = torch.lstm(x, (start, start), weights, True, 1, 0.0, False, False, False)
    return hidden.clone()


@lstm_layer.register_fake
def _(x: Tensor, weight: Tensor, recurrence: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], recurrence.shape[2])


def _gates(weight: Tensor, D: int, order: tuple[int, ...]) -> Tensor:
    """A weight of four gates, D rows each, its gates in another order."""
    gates = weight.split(D)
    return torch.cat([gates[gate] for gate in order])


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(gate) for gate in range(len(order)))


class LSTMLayers(nn.Module):
    """The layers of an `nn.LSTM` for inference, a layer an op.

    Args:
        lstm: Of one direction, without projections, frames first.
    """

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        D = lstm.hidden_size
        self.layers = lstm.num_layers
        for layer in range(lstm.num_layers):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            held = [getattr(lstm, f"{name}_l{layer}").detach() for name in names]
            weight, recurrence, of_frames, of_states = (_gates(part, D, TO_ONNX) for part in held)
            bias = torch.cat([of_frames, of_states])
            for name, part in (("weight", weight), ("recurrence", recurrence), ("bias", bias)):
                kept = nn.Parameter(part[None], requires_grad=False)
                self.register_parameter(f"{name}_{layer}", kept)

    def forward(self, x: Tensor, states: object = None) -> tuple[Tensor, None]:
        """Hidden states (T, B, D) from zeros, and no states, as none are asked for.

        Args:
            x: Frames (T, B, C), in the dtype of the weights.
            states: None, as `nn.LSTM` takes it; not looked at.
        """
        for layer in range(self.layers):
            names = ("weight", "recurrence", "bias")
            weights: list[Any] = [getattr(self, f"{name}_{layer}") for name in names]
            x = lstm_layer(x, *weights)
        return x, None


def replace_lstms(module: nn.Module) -> nn.Module:
    """Replace every `nn.LSTM` in `module`, in place, by its layers; returns the module."""
    for name, child in module.named_children():
        if isinstance(child, nn.LSTM):
            setattr(module, name, LSTMLayers(child).eval())
        else:
            replace_lstms(child)
    return module
