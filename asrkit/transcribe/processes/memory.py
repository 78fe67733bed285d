"""What Linux says about memory: how much is free, and how much of a process is its own."""

import os
from pathlib import Path

SYSTEM = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
# Files of a container's limit, of what it uses, and of statistics with its inactive file cache:
CGROUPS = [
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),  # of cgroups v2
    (  # of v1
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
]


def free_memory(file: Path = SYSTEM, folder: Path = CONTAINER) -> int | None:
    """Bytes that processes can take without swapping; None where the system does not say.

    A container's limit counts too.

    Args:
        file: Where Linux says what the machine has.
        folder: Where it says what the container may have.
    """
    known = [size for size in (_of_machine(file), _of_container(folder)) if size is not None]
    return min(known, default=None)


def _of_container(folder: Path) -> int | None:
    """Bytes left of the limit of this process' container; None where there is none."""
    for limit, used, statistics, cache in CGROUPS:
        if not ((folder / limit).exists() and (folder / used).exists()):
            continue
        most = (folder / limit).read_text().strip()
        if not most.isdigit():  # "max": no limit
            return None
        taken = int((folder / used).read_text()) - _file_cache(folder / statistics, cache)
        return max(0, int(most) - taken)
    return None


def _file_cache(file: Path, name: str) -> int:
    """Bytes that count as used and are given up when others need them."""
    if not file.exists():
        return 0
    sizes = dict(line.split() for line in file.read_text().splitlines())
    return int(sizes.get(name, 0))


def _of_machine(file: Path) -> int | None:
    """Bytes that are available on the machine."""
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return _bytes(value)
    return None


def process_memory(pid: int | None = None) -> dict[str, int] | None:
    """Bytes of a process in memory; None where the system does not say.

    "own" is what no other process has, "share" is that and its part of what several have (PSS), and
    "all" counts what it shares in full (RSS).

    Args:
        pid: Of the process; None: this one.
    """
    file = Path(f"/proc/{pid or os.getpid()}/smaps_rollup")
    if not file.exists():
        return None
    sizes = dict.fromkeys(("own", "share", "all"), 0)
    kinds = {"Private_Clean": "own", "Private_Dirty": "own", "Pss": "share", "Rss": "all"}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kinds:
            sizes[kinds[name]] += _bytes(value)
    return sizes


def _bytes(value: str) -> int:
    """Bytes of "  524288 kB"."""
    return int(value.split()[0]) * 1024
