"""The processes of a training run: torchrun starts them, DDP averages their gradients."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from asrkit.shapes import expect
from asrkit.training.config import differences
from asrkit.training.objective import BatchLoss

# How long processes wait for each other: the first scores the dev set.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """One process of a run, its rank, and how many there are.

    Args:
        rank: Number of this process.
        count: Processes in all.
        on_machine: Processes on its machine.
    """

    rank: int = 0
    count: int = 1
    on_machine: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum of each value over the processes, in float64."""
        return self.total(torch.tensor(values, dtype=torch.float64)).tolist()

    def total(self, vector: Tensor) -> Tensor:
        """`vector`, which becomes its sum over the processes."""
        if self.count > 1 and len(vector):
            dist.all_reduce(vector)
        return vector

    def by_first(self, action: Callable[[], object]) -> None:
        """Call `action` in the first process alone; its ValueError or OSError is raised in all."""
        if self.count == 1:
            action()
            return
        errors: list[Exception | None] = [None]
        if self.first:
            try:
                action()
            except (ValueError, OSError) as error:
                errors = [error]
        dist.broadcast_object_list(errors)
        if errors[0] is not None:
            raise errors[0]

    def expect_same(self, settings: dict[str, Any]) -> None:
        """ValueError in every process if one of them has other settings than the first."""
        if self.count == 1:
            return
        everybody = [settings] * self.count
        dist.all_gather_object(everybody, settings)
        for rank, theirs in enumerate(everybody):
            changed = differences(everybody[0], theirs)
            got = f"other ones on rank {rank}: {changed}"
            remedy = "Start all with the same command, data and folder."
            expect(not changed, "settings", "the same on all processes", got, remedy)


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
    by_torchrun = "LOCAL_WORLD_SIZE" in os.environ
    got = "the variables WORLD_SIZE and RANK alone"
    expect(by_torchrun, "processes", "ones that torchrun started", got, "Start them by torchrun.")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, count = next(dist.rendezvous("env://", timeout=PATIENCE))
    store.set_timeout(PATIENCE)
    store = of_this_start(store, rank, count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    try:
        on_machine = int(os.environ["LOCAL_WORLD_SIZE"])
        yield Processes(rank, count, on_machine)
    finally:
        dist.destroy_process_group()


def of_this_start(store: dist.Store, rank: int, count: int) -> dist.Store:
    """`store` under a prefix that the processes of one start share, and no other start has.

    torchrun's store outlives its processes. After a restart gloo would find the addresses of the
    dead in it (https://github.com/pytorch/pytorch/issues/135712). The first process chooses the
    prefix, and each other one answers under it. A prefix of an earlier start was never confirmed
    to a process of this one.

    Args:
        store: What the processes share, with keys of earlier starts.
        rank: Of this process.
        count: Processes in all.
    """
    own = uuid4().hex
    if rank == 0:
        store.set("first", own)
        answers = [store.get(f"{own}/{other}") for other in range(1, count)]  # waits for each
        store.set(f"{own}/answers", b" ".join(answers).decode())
        return dist.PrefixStore(own, store)
    until = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < until:
        prefix = store.get("first").decode()
        store.set(f"{prefix}/{rank}", own)
        confirmed = f"{prefix}/answers"
        if store.check([confirmed]) and own.encode() in store.get(confirmed):
            return dist.PrefixStore(prefix, store)
        time.sleep(0.05)
    raise TimeoutError("The first process did not start.")


def replicated(loss: BatchLoss, processes: Processes) -> nn.Module:
    """`loss`, under DDP where there are several processes; `Statistics` are not its concern."""
    if processes.count == 1:
        return loss
    idle_head = loss.config.ctc_weight == 0  # DDP would wait for its gradients
    return DistributedDataParallel(loss, broadcast_buffers=False, find_unused_parameters=idle_head)


def averaging(loss: nn.Module, now: bool) -> AbstractContextManager[None]:
    """A block whose backward pass averages the gradients of all processes, or where not `now` adds
    to those of this one.
    """
    if isinstance(loss, DistributedDataParallel) and not now:
        return loss.no_sync()
    return nullcontext()
