"""Processes of a training run: torchrun starts them, and DDP averages their gradients."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from asrkit.shapes import expect
from asrkit.training.config import differences
from asrkit.training.objective import BatchLoss

R = TypeVar("R")
# How long processes wait for each other: the first one alone scores the dev set.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Args:
        rank: Number of this process.
        count: Number of all processes.
        on_machine: Number of processes on this machine.
    """

    rank: int = 0
    count: int = 1
    on_machine: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum of each value over the processes, in float64."""
        return self.all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()

    def all_reduce(self, vector: Tensor) -> Tensor:
        """`vector`, replaced in place by its sum over the processes."""
        if self.count > 1 and len(vector):
            dist.all_reduce(vector)
        return vector

    def in_first(self, action: Callable[[], R]) -> R:
        """Result of `action`, which only the first process calls; all get it, or raise its
        ValueError or OSError.
        """
        if self.count == 1:
            return action()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = action()
            except (ValueError, OSError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        result: R = outcome[0]
        return result

    def expect_same(self, settings: dict[str, Any]) -> None:
        """ValueError in every process if the settings of any differ from those of the first."""
        if self.count == 1:
            return
        gathered = [settings] * self.count
        dist.all_gather_object(gathered, settings)
        for rank, theirs in enumerate(gathered):
            changed = differences(gathered[0], theirs)
            got = f"other ones on rank {rank}: {changed}"
            remedy = "Start all with the same command, data and folder."
            expect(not changed, "settings", "the same on all processes", got, remedy)


@contextmanager
def process_group(device: torch.device) -> Iterator[Processes]:
    """The processes of this run, connected in one process group until the block ends.

    A process that torchrun did not start runs alone, without a group.

    Args:
        device: Device of this process. NCCL connects GPUs, gloo everything else.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    by_torchrun = "LOCAL_WORLD_SIZE" in os.environ
    got = "the variables WORLD_SIZE and RANK alone"
    expect(by_torchrun, "processes", "processes of torchrun", got, "Start them by torchrun.")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, count = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    store = store_of_this_start(store, rank, count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    try:
        on_machine = int(os.environ["LOCAL_WORLD_SIZE"])
        yield Processes(rank, count, on_machine)
    finally:
        dist.destroy_process_group()


def store_of_this_start(store: dist.Store, rank: int, count: int) -> dist.Store:
    """`store` under a prefix that the processes of this start share, and no earlier start used.

    torchrun's store outlives its processes. After a restart gloo would find the addresses of dead
    processes in it (https://github.com/pytorch/pytorch/issues/135712). The first process chooses
    the prefix. Each other process writes a random key under it and waits until the first has
    confirmed that key, which no first process of an earlier start can have done.

    Args:
        store: Store of all starts, with keys of earlier ones.
        rank: Rank of this process.
        count: Number of all processes.
    """
    own = uuid4().hex
    if rank == 0:
        store.set("first", own)
        answers = [store.get(f"{own}/{other}") for other in range(1, count)]  # waits for each
        store.set(f"{own}/answers", b" ".join(answers).decode())
        return dist.PrefixStore(own, store)
    until = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < until:
        prefix = store.get("first").decode()
        store.set(f"{prefix}/{rank}", own)
        confirmed = f"{prefix}/answers"
        if store.check([confirmed]) and own.encode() in store.get(confirmed):
            return dist.PrefixStore(prefix, store)
        time.sleep(0.05)
    raise TimeoutError("The first process did not start.")


def data_parallel(loss: BatchLoss, processes: Processes) -> nn.Module:
    """`loss`, wrapped in DDP if there are several processes.

    `asrkit.training.batch_norm` averages running statistics, not DDP.
    """
    if processes.count == 1:
        return loss
    idle_head = loss.config.ctc_weight == 0  # DDP would wait for the head's gradients
    return DistributedDataParallel(loss, broadcast_buffers=False, find_unused_parameters=idle_head)


def gradient_sync(loss: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """A block whose backward pass averages gradients over all processes.

    With `enabled` False it accumulates the gradients of this process instead.
    """
    if isinstance(loss, DistributedDataParallel) and not enabled:
        return loss.no_sync()
    return nullcontext()
