"""The processes of a training run: who they are, how they meet, and what they agree on.

`torchrun` and `asrkit train --ranks` start them and number them by RANK in the environment. A
process without RANK trains alone, with no process group and no socket.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from asrkit.shapes import expect

T = TypeVar("T")
STORE = "ASRKIT_STORE"  # path of the file through which ranks of `asrkit train --ranks` meet
# The first step compiles and loads; a checkpoint and an evaluation may take long as well.
PATIENT = timedelta(minutes=30)
STEPPING = timedelta(minutes=2)


@dataclass(frozen=True)
class Processes:
    """One process of a run, and how many there are.

    Args:
        rank: Number of this process.
        count: Processes in all.
        local_rank: Number of this process on its machine.
        local_count: Processes on its machine.
        grouped: Whether they form a process group of torch; one alone need not.
        restarts: How often the processes of this run were started before; of their first start 0.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    grouped: bool = False
    restarts: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def lanes(self, lanes: int) -> range:
        """The lanes that this process computes, one after the other.

        Args:
            lanes: Lanes in all.

        Raises:
            ValueError: They cannot be shared out equally.
        """
        wanted = f"a multiple of the {self.count} processes"
        expect(lanes % self.count == 0, "lanes", wanted, lanes, "Set --lanes or --ranks.")
        return range(self.rank, lanes, self.count)

    def total(self, values: list[float]) -> list[float]:
        """Sum of each value over the processes, in float64; on the host, so no device waits."""
        vector = torch.tensor(values, dtype=torch.float64)
        self.sum_(vector)
        return vector.tolist()

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the processes."""
        if self.grouped:
            dist.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, by rank; has to be picklable."""
        if not self.grouped:
            return [value]
        values: list[T] = [value] * self.count
        dist.all_gather_object(values, value)
        return values

    def by_first(self, action: Callable[[], T]) -> T:
        """What `action` returns, called by rank 0 alone. The others wait for it.

        Raises:
            ValueError: `action` raised one; every process raises it.
            OSError: Likewise.
        """
        if not self.grouped:
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
        """Raise ValueError on every process if one of them has other values than rank 0.

        Args:
            what: Texts by name, for example hashes of settings and data.
        """
        everybody = self.gather(what)
        for rank, theirs in enumerate(everybody):
            for name, value in everybody[0].items():
                same = theirs[name] == value
                wanted = f"the same on all processes, {value:.40} as on rank 0"
                got = f"{theirs[name]:.40} on rank {rank}"
                expect(same, name, wanted, got, "Start all with the same command and data.")

    def wait(self) -> None:
        """Wait until all processes have come here."""
        self.total([])

    @contextmanager
    def patience(self) -> Iterator[None]:
        """While the block runs, processes wait for each other up to half an hour, as at the start.

        After it they wait two minutes: see `set_timeout`.
        """
        self.set_timeout(PATIENT)
        yield
        self.set_timeout(STEPPING)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long processes wait for each other; one that waits longer ends with an error.

        Args:
            timeout: From now on.
        """
        if self.grouped:
            dist.distributed_c10d._set_pg_timeout(timeout)


def was_started_as_rank() -> bool:
    """Whether torchrun or `asrkit train --ranks` started this process."""
    return "RANK" in os.environ


@contextmanager
def joined(device: torch.device, *, alone_too: bool = False) -> Iterator[Processes]:
    """The processes of this run, in one process group until the block ends.

    A group that exists already is used, and left as it is.

    Args:
        device: Where this process computes; NCCL connects GPUs, gloo the rest.
        alone_too: Whether a process that is alone forms a group as well, which FSDP2 needs.
    """
    if dist.is_initialized():
        yield _present_processes()
        return
    restarts = 0
    if was_started_as_rank():
        restarts = _meet(device)
    elif alone_too:
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    else:
        yield Processes()
        return
    try:
        present = _present_processes()
        # an agent counts the failures of its own machine only
        yield replace(present, restarts=max(present.gather(restarts)))
    finally:
        dist.destroy_process_group()


def _backend(device: torch.device) -> str:
    """Backends of a process group: gloo for what lies on the host, NCCL for what lies on a GPU."""
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _present_processes() -> Processes:
    return Processes(
        rank=dist.get_rank(),
        count=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_count=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        grouped=True,
    )


def _meet(device: torch.device) -> int:
    """Form the process group: by a file where `asrkit train --ranks` made one, else by TCP.

    Each attempt of an elastic agent meets in a store of its own. In torch 2.11 the agent's store
    outlives a restart without a prefix, so the new ranks would read the addresses of the dead.

    Returns:
        How often the processes were started before, as far as this one knows.
    """
    rank = int(os.environ["RANK"])
    count = int(os.environ["WORLD_SIZE"])
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store: dist.Store
    if STORE in os.environ:
        store = dist.FileStore(f"{os.environ[STORE]}-{restarts}", count)
    else:
        agent_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        server = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=count,
            is_master=rank == 0 and not agent_listens,
            timeout=PATIENT,
            multi_tenant=True,
        )
        number = _number_of_attempt(server, rank, count)
        restarts = max(restarts, number - 1)
        store = dist.PrefixStore(f"asrkit-{number}", server)
    dist.init_process_group(
        _backend(device), store=store, rank=rank, world_size=count, timeout=PATIENT
    )
    return restarts


def _number_of_attempt(store: dist.Store, rank: int, count: int) -> int:
    """Number of this attempt among those that met in this store, from 1; the same on all ranks.

    An agent's own count does not serve: where a rank on another machine failed, it starts its ranks
    again and counts nothing. So rank 0 counts, and tells each rank, which asks under a name that
    no rank of an attempt before had.

    Args:
        store: That may have served attempts before, all of whose ranks have ended.
        rank: Of this process.
        count: Processes in all.
    """
    asked = [f"asrkit-asked-{other}" for other in range(count)]
    if rank == 0:
        for other in range(1, count):
            store.delete_key(asked[other])  # of an attempt before
        number = store.add("asrkit-attempts", 1)
        for other in range(1, count):
            name = store.get(asked[other]).decode()  # waits for it
            store.set(name, str(number))
        return number
    name = f"asrkit-told-{uuid.uuid4().hex}"
    patience = time.monotonic() + PATIENT.total_seconds()
    while not store.check([name]):
        if time.monotonic() > patience:
            raise RuntimeError(f"Rank 0 has not answered rank {rank} for half an hour.")
        store.set(asked[rank], name)  # again: rank 0 may have deleted it
        time.sleep(0.05)
    return int(store.get(name))
