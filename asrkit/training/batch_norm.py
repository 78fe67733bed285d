"""Running statistics of batch norms, which each forward pass updates: read, and written back."""

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Running means, variances and counts of all batch norms of a model, as one vector.

    A step of several batches, of one process or of many, updates them once: to the mean of what
    each batch alone would give. A skipped step leaves them unchanged.

    Args:
        model: A model with any number of batch norms.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm1d)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers()]
        self._none = torch.empty(0, device=next(model.parameters()).device, dtype=torch.float32)

    def read(self) -> Tensor:
        """A copy, (N,) float32."""
        vectors = [buffer.flatten() for buffer in self.buffers]
        return torch.cat(vectors) if vectors else self._none.clone()

    def write(self, vector: Tensor) -> None:
        """Overwrite the statistics.

        Args:
            vector: New values, in the layout that `read` returns.
        """
        parts = vector.split([buffer.numel() for buffer in self.buffers])
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
