"""Lanes: what is trained does not depend on the number of processes.

A step takes a fixed number of batches, one a lane, and minimises the mean over the labels of all of
them. N processes compute lanes / N each, one after the other. A lane's batch, augmentation and
dropout follow from (seed, step, lane), and its batch norm sees that batch alone. So, at the same
rate and curriculum, the number of processes changes the order of sums and nothing else.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from asrkit.training.processes import Processes


def lane_number(step: int, lane: int, lanes: int) -> int:
    """Number of a lane's batch in the whole run; seeds follow from it.

    Args:
        step: Number of the step.
        lane: Number of the lane.
        lanes: Lanes in all.
    """
    return step * lanes + lane


def weigh(per_label: Tensor, labels: float, all_labels: float, *, processes: int) -> Tensor:
    """Share of one lane in the mean loss per label of all lanes, times the number of processes.

    DDP and FSDP2 divide the sum of the processes' gradients by their number, which the factor
    undoes. The mean of the lanes' own means would be another loss: it weighs a label of a lane with
    few labels more than others.

    Args:
        per_label: Loss of the lane in nats per label, a scalar.
        labels: Labels of the lane.
        all_labels: Labels of all lanes.
        processes: Processes whose gradients are averaged.
    """
    share = max(labels, 1.0) / max(all_labels, 1.0)
    return per_label * (share * processes)


class LaneStatistics:
    """Running statistics of batch norm over lanes, and the sum of the lanes' losses.

    Each lane starts from the statistics before the step, and the mean over lanes stays. With one
    lane this is what batch norm does by itself.

    Args:
        model: Its batch norms are taken.
        lanes: Lanes of a step.
    """

    def __init__(self, model: nn.Module, lanes: int) -> None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self.lanes = lanes
        self.statistics: list[Tensor] = []
        self.counters: list[Tensor] = []
        for norm in norms:
            if norm.running_mean is not None and norm.running_var is not None:
                self.statistics += [norm.running_mean, norm.running_var]
            if norm.num_batches_tracked is not None:
                self.counters.append(norm.num_batches_tracked)
        self.loss: Tensor | None = None

    def begin_step(self) -> None:
        """Note the statistics that every lane of the next step starts from."""
        self.loss = None
        if self.lanes > 1:
            self.before = [value.clone() for value in (*self.statistics, *self.counters)]
            self.sums = [torch.zeros_like(value, dtype=torch.float64) for value in self.statistics]

    def begin_lane(self) -> None:
        """Set the statistics to those before the step."""
        if self.lanes > 1:
            pairs = zip((*self.statistics, *self.counters), self.before, strict=True)
            for value, before in pairs:
                value.copy_(before)

    def end_lane(self, share: Tensor) -> None:
        """Add what a lane has made of the statistics, and its share of the loss.

        Args:
            share: The lane's share of the loss, a scalar.
        """
        loss = share.detach().double()
        self.loss = loss if self.loss is None else self.loss + loss
        if self.lanes > 1:
            for total, value in zip(self.sums, self.statistics, strict=True):
                total += value

    def end_step(self, processes: Processes) -> Tensor:
        """Set the statistics to their mean over the lanes of all processes.

        Args:
            processes: That computed the lanes.

        Returns:
            The loss of the step in nats per label, a scalar in float64.
        """
        assert self.loss is not None  # a process has a lane at least
        if self.lanes == 1:
            return self.loss
        flat = torch.cat([self.loss.reshape(1), *(total.flatten() for total in self.sums)])
        processes.sum_(flat)
        sizes = [1, *(value.numel() for value in self.statistics)]
        loss, *totals = flat.split(sizes)
        for value, total in zip(self.statistics, totals, strict=True):
            value.copy_((total / self.lanes).view_as(value))
        return loss[0]
