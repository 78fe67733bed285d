"""Exponential moving averages (EMA) of a model's weights, which a run exports and scores."""

from copy import deepcopy

import torch
from torch import Tensor, nn


class Averages:
    """Averages of the weights and floating-point buffers of a model; at first, their values.

    torch's `AveragedModel` copies its counter to the device at each step, which waits for it.

    Args:
        model: The model. `module`, a copy of it, has the averages.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = deepcopy(model)

    @torch.no_grad()
    def move(self, model: nn.Module, share: Tensor) -> None:
        """Move the averages towards the present values; whole numbers are copied.

        Args:
            model: The model with its present weights.
            share: Part of the distance, from 0 to 1, a scalar on the model's device. With 0 the
                averages stay as they are.
        """
        averages = [*self.module.parameters(), *self.module.buffers()]
        values = [*model.parameters(), *model.buffers()]
        for whole in [n for n, one in enumerate(averages) if not one.is_floating_point()][::-1]:
            averages.pop(whole).copy_(values.pop(whole))
        distances = torch._foreach_sub(values, averages)
        torch._foreach_mul_(distances, share)
        torch._foreach_add_(averages, distances)
