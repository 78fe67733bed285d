"""Batch norm over all ranks of a group, on any device; torch's SyncBatchNorm refuses CPUs."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from asrkit.parallel.groups import place_in


class BatchNorm(nn.BatchNorm1d):
    """nn.BatchNorm1d whose statistics in training are those of all ranks' inputs together.

    Its parameters and buffers are those of nn.BatchNorm1d, and in evaluation it is one. Scale and
    shift get the gradient of this rank's part; its sum over the ranks is that of the whole.

    Args:
        features: Channels C of the input (B, C, T).
        group: The ranks; None for all processes.
        eps: Added to the variance.
        momentum: Share of a batch's statistics in the running ones.
    """

    def __init__(
        self,
        features: int,
        *,
        group: dist.ProcessGroup | None = None,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__(features, eps=eps, momentum=momentum)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """Normalised (B, C, T) of `input` (B, C, T).

        Raises:
            ValueError: The group has one rank.
        """
        if not self.training:
            return super().forward(input)
        place_in(self.group, "torch.nn.BatchNorm1d")
        x = input
        if x.dtype != torch.float64:
            x = x.float()  # half precision cannot count the frames
        frames = x.new_tensor([x.shape[0] * x.shape[2]])
        sums = torch.cat((x.sum((0, 2)), frames))
        totals = all_reduce(sums, group=self.group)
        count = totals[-1]
        mean = totals[:-1] / count
        centred = x - mean[:, None]
        squares = all_reduce(centred.square().sum((0, 2)), group=self.group)
        variance = squares / count
        self._remember(mean.detach(), squares.detach() / (count.detach() - 1))
        normal = centred * (variance + self.eps).rsqrt()[:, None]
        return (normal * self.weight[:, None] + self.bias[:, None]).to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of a batch, the variance unbiased."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        dtype = self.running_mean.dtype
        self.running_mean.lerp_(mean.to(dtype), self.momentum)
        self.running_var.lerp_(variance.to(dtype), self.momentum)
