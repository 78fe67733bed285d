"""The number of workers, and the cores and threads of each."""

import os
import sys
from dataclasses import dataclass

import torch

from asrkit.memory import free_memory
from asrkit.shapes import expect, whole
from asrkit.threads import same_core, usable_cores

WORKER_BYTES = 2**30  # memory for each worker, in addition to the weights that all share


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Workers, and the cores and threads of each.

    Args:
        cores: For each worker the logical CPUs that it is pinned to; an empty tuple: any.
        threads: Threads that compute in each worker; None: torch's default.
        why: What determined the number of workers, in a few words.
    """

    cores: tuple[tuple[int, ...], ...] = ((),)
    threads: int | None = None
    why: str = "as requested"

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.cores)


def choose_layout(
    workers: int | str = "auto",
    *,
    threads: int | None = None,
    recordings: int | None = None,
    model_bytes: int = 0,
) -> Layout:
    """The layout of `workers` forked processes on the cores that this process may use.

    Each worker is pinned to its share of the affinity mask, where logical CPUs of one core stay
    together. Nothing is pinned if a container's quota is smaller than the mask, since others may
    use the same cores, or if the system cannot pin processes (macOS).

    Args:
        workers: Number of workers; "auto": one for each core, limited by recordings and memory.
        threads: Threads of each worker; None: cores divided by workers, rounded down.
        recordings: Number of recordings to transcribe, if known.
        model_bytes: Memory that the model will need, if it is not loaded yet.

    Raises:
        ValueError: There are fewer cores than workers, or this system cannot fork processes.
    """
    remedy = "--shards with --part K/N works there, a process a part."
    expect(hasattr(os, "fork"), "workers", "a system that forks processes", sys.platform, remedy)
    can_pin = hasattr(os, "sched_setaffinity")
    mask = os.sched_getaffinity(0) if can_pin else range(os.cpu_count() or 1)
    most = usable_cores()
    cores = min(most, len({same_core(cpu) for cpu in mask}))
    why = "as requested"
    if workers == "auto":
        available = max(0, free_memory() - model_bytes)
        limits = {
            "one a core": cores,
            "one a recording": recordings or cores,
            "as free memory allows": available / WORKER_BYTES,
        }
        why = min(limits, key=limits.__getitem__)
        workers = max(1, int(limits[why]))
    wanted = f"auto, or 1 to {most}, the cores of this process"
    expect(whole(workers, 1, most), "workers", wanted, workers)
    number = int(workers)
    pinned: tuple[tuple[int, ...], ...] = ((),) * number
    if can_pin and most == len(mask):
        shares = torch.tensor(sorted(mask, key=same_core), device="cpu").tensor_split(number)
        pinned = tuple(tuple(share.tolist()) for share in shares)
    return Layout(cores=pinned, threads=threads or max(1, cores // number), why=why)
