"""The processes of a training run: torchrun starts them, DDP averages their gradients."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asrkit.models.presets import Model
from asrkit.shapes import expect
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.objective import TrainingLoss, training_loss

T = TypeVar("T")
# How long processes wait for each other: the first compiles kernels and scores the dev set.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """One process of a run, and how many there are.

    Args:
        rank: Number of this process.
        count: Processes in all.
        local_rank: Number of this process on its machine.
        local_count: Processes on its machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Numbers of the batches of a step that this process takes, of `count` in all."""
        return range(self.rank, count, self.count)

    def sum(self, *values: float) -> list[float]:
        """Sum of each value over the processes, in float64."""
        vector = torch.tensor(values, dtype=torch.float64)
        if self.count > 1:
            dist.all_reduce(vector)
        return vector.tolist()

    def by_first(self, action: Callable[[], T]) -> T:
        """What `action` returns, called by the first process alone. The others wait for it.

        Raises:
            ValueError: `action` raised one; every process raises it.
            OSError: Likewise.
        """
        if self.count == 1:
            return action()
        outcome: list[T | Exception | None] = [None]
        if self.first:
            try:
                outcome[0] = action()
            except (ValueError, OSError) as error:
                outcome[0] = error
        dist.broadcast_object_list(outcome)
        (result,) = outcome
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[return-value]

    def expect_same(self, what: dict[str, str]) -> None:
        """Raise ValueError on every process if one of them has other values than the first.

        Args:
            what: Texts by name, for example hashes of settings and data.
        """
        everybody = [what] * self.count
        if self.count > 1:
            dist.all_gather_object(everybody, what)
        for rank, theirs in enumerate(everybody):
            for name, value in everybody[0].items():
                wanted = f"the same on all processes, {value:.40} as on rank 0"
                got = f"{theirs[name]:.40} on rank {rank}"
                remedy = "Start all with the same command and data."
                expect(theirs[name] == value, name, wanted, got, remedy)


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """The processes of this run, in one process group until the block ends.

    A process that torchrun did not start is alone, without a group.

    Args:
        device: Where this process computes; NCCL connects GPUs, gloo the rest.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield Processes(
            rank=dist.get_rank(),
            count=dist.get_world_size(),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_count=int(os.environ["LOCAL_WORLD_SIZE"]),
        )
    finally:
        dist.destroy_process_group()


class BatchLoss(nn.Module):
    """The loss of a batch as a module, for DDP acts on the forward pass of what it wraps.

    All use of the weights lies in this one, also where a loss reads them directly.

    Args:
        model: The model that is trained.
        config: How it is trained.
    """

    def __init__(self, model: Model, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, batch: Prepared) -> TrainingLoss:
        """`training_loss` of a batch."""
        return training_loss(self.model, batch, self.config)


def replicated(loss: BatchLoss, processes: Processes) -> nn.Module:
    """`loss`, under DDP where there are several processes.

    Running statistics of batch norm are those of the first process.

    Args:
        loss: Of the model.
        processes: Of this run.
    """
    if processes.count == 1:
        return loss
    idle_head = loss.config.ctc_weight == 0  # DDP would wait for its gradients
    return DistributedDataParallel(loss, broadcast_buffers=False, find_unused_parameters=idle_head)


def accumulating(loss: nn.Module) -> AbstractContextManager[None]:
    """A block whose backward pass adds to the gradients of this process, without averaging them.

    Args:
        loss: What `replicated` returned.
    """
    if isinstance(loss, DistributedDataParallel):
        return loss.no_sync()
    return nullcontext()
