"""What Linux says about memory: how much is free, and how much of a process is its own."""

import os
from pathlib import Path

SYSTEM = Path("/proc/meminfo")


def free_memory(file: Path = SYSTEM) -> int | None:
    """Bytes that processes can take without swapping; None where the system does not say.

    Args:
        file: Where Linux says it.
    """
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
