"""Numbers of the device that are read a step late: the CPU queues the next step meanwhile."""

import torch
from torch import Tensor


class Reading:
    """Scalars on their way to the host: their copy starts at once, and `values` waits for it alone.

    Args:
        scalars: Tensors of one element on one device.
    """

    def __init__(self, *scalars: Tensor) -> None:
        together = torch.stack([scalar.detach().double() for scalar in scalars])
        self.copied: torch.cuda.Event | None = None
        self.numbers = together
        if together.is_cuda:
            self.numbers = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
            self.numbers.copy_(together, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def values(self) -> list[float]:
        """The numbers; waits until what made them has run."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers.tolist()
