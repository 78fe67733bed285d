"""How many processes transcribe on this machine, and on which cores."""

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asrkit.runtime import usable_cores
from asrkit.shapes import expect, whole
from asrkit.transcribe.processes.memory import free_memory

AUTO = "auto"
CPUS = Path("/sys/devices/system/cpu")
WORKER_BYTES = 2**30  # allowed for each process beside the weights, which all share


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes, and the cores and threads of each.

    Args:
        cores: Logical CPUs that each process is pinned to; empty tuples where none is.
        threads: That compute, in each process.
        why: What the number of processes follows from, in some words.
    """

    cores: tuple[tuple[int, ...], ...]
    threads: int
    why: str

    @property
    def workers(self) -> int:
        """The number of processes."""
        return len(self.cores)

    @property
    def pinned(self) -> bool:
        """Whether each process has cores of its own."""
        return any(self.cores)


def choose_layout(
    workers: int | str = AUTO,
    *,
    threads: int | None = None,
    recordings: int | None = None,
    model_bytes: int = 0,
) -> Layout:
    """The layout of `workers` processes on the cores that this process may use.

    A process is pinned to its share of the affinity mask; logical CPUs of one core stay together.
    None is pinned where a container's quota is smaller than the mask (others may use the same
    cores), or where the system pins nothing, such as macOS.

    Args:
        workers: How many; "auto" is one for each core, as far as recordings and free memory go.
        threads: Of each process; None: cores over processes, rounded down.
        recordings: That are to be transcribed, if that is known.
        model_bytes: Memory that the model will take, where it is not loaded yet.

    Raises:
        ValueError: There are not so many cores, or this system cannot fork processes.
    """
    forks = hasattr(os, "fork")
    remedy = "--shards with --part K/N works there, a process a part."
    expect(forks, "workers", "a system that forks processes", platform.system(), remedy)
    mask = affinity()
    most = min(usable_cores(), len(mask))
    groups = same_core(mask)
    cores = min(most, len(groups))
    if workers == AUTO:
        number, why = _automatic(cores, recordings, model_bytes)
    else:
        wanted = f"auto, or 1 to {most}, the cores of this process"
        expect(whole(workers, 1, most), "workers", wanted, workers)
        number, why = int(workers), "as asked"
    if threads is None:
        threads = max(1, cores // number)
    wanted = f"1 to {most // number} with {number} workers on {most} cores"
    expect(whole(threads, 1, most // number), "threads", wanted, threads)
    pins = hasattr(os, "sched_setaffinity") and most == len(mask)
    pinned = shares(groups, number) if pins else ((),) * number
    return Layout(cores=pinned, threads=threads, why=why)


def _automatic(cores: int, recordings: int | None, model_bytes: int) -> tuple[int, str]:
    """How many processes, and why."""
    limits = {"one a core": cores}
    if recordings is not None:
        limits["one a recording"] = max(1, recordings)
    free = free_memory()
    if free is not None:
        room = max(0, free - model_bytes)
        why = f"as {room / 2**30:.1f} GiB of free memory allow"
        if model_bytes:
            why = f"as {room / 2**30:.1f} GiB of free memory beside the model allow"
        limits[why] = max(1, room // WORKER_BYTES)
    why = min(limits, key=lambda name: limits[name])
    return limits[why], why


def shares(groups: list[list[int]], number: int) -> tuple[tuple[int, ...], ...]:
    """Logical CPUs in even shares, of whole cores if these suffice.

    Args:
        groups: Those that share a core, as `same_core` returns them.
        number: Of shares, at most as many as logical CPUs.
    """
    units = groups
    if number > len(groups):
        units = [[cpu] for group in groups for cpu in group]
    ends = [len(units) * (one + 1) // number for one in range(number)]
    starts = [0, *ends]
    return tuple(
        tuple(cpu for unit in units[start:end] for cpu in unit)
        for start, end in zip(starts, ends, strict=False)
    )


def affinity() -> list[int]:
    """The logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def same_core(cpus: Iterable[int], folder: Path = CPUS) -> list[list[int]]:
    """Logical CPUs in groups that share a core; each alone where the system does not say.

    Args:
        cpus: Their numbers.
        folder: Where Linux describes them.
    """
    groups: dict[str, list[int]] = {}
    for cpu in cpus:
        file = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        siblings = str(cpu)
        if file.exists():
            siblings = file.read_text().strip()
        groups.setdefault(siblings, []).append(cpu)
    return list(groups.values())
