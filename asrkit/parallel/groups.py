"""A group of processes: its ranks, and messages between neighbours."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from asrkit.shapes import expect


class Place(NamedTuple):
    """A rank of a group, and how many there are."""

    rank: int
    ranks: int

    @property
    def is_first(self) -> bool:
        """Whether no rank comes before this one."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether no rank comes after this one."""
        return self.rank == self.ranks - 1


def place_in(group: dist.ProcessGroup | None, instead: str) -> Place:
    """This process's place in a group of two ranks or more.

    Args:
        group: The group; None for all processes.
        instead: What to call where there is one process only.

    Raises:
        ValueError: There is no group, or it has one rank.
    """
    remedy = f"With one process call {instead}."
    started = dist.is_available() and dist.is_initialized()
    wanted = "a group of 2 ranks or more"
    expect(started, "group", wanted, "none: torch.distributed is not initialised", remedy)
    place = Place(dist.get_rank(group), dist.get_world_size(group))
    expect(place.rank >= 0, "group", "a group that has this process", "one without it")
    expect(place.ranks > 1, "group", wanted, f"{place.ranks} rank", remedy)
    return place


class Messages:
    """Tensors on their way to and from the neighbours; `wait` before any of them is used.

    Args:
        group: The group; None for all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.operations: list[dist.P2POp] = []
        self.works: list[dist.Work] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send `tensor` to `rank` of the group; nothing if it is empty."""
        if tensor.numel():
            made = tensor.detach().contiguous()
            self.operations.append(dist.P2POp(dist.isend, made, group=self.group, group_peer=rank))

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill `tensor`, which is contiguous, from `rank` of the group; nothing if it is empty."""
        if tensor.numel():
            self.operations.append(
                dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank)
            )

    def start(self) -> "Messages":
        """Begin to send and receive; returns this object."""
        if self.operations:
            self.works = dist.batch_isend_irecv(self.operations)
        return self

    def wait(self) -> None:
        """Return when all has been sent and received."""
        for work in self.works:
            work.wait()
        self.works = []
