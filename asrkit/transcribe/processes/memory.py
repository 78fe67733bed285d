"""How much memory Linux has free for this process."""

from pathlib import Path

SYSTEM = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")


def free_memory(file: Path = SYSTEM, folder: Path = CONTAINER) -> int | None:
    """Bytes that processes can take without swapping; None where the system does not say.

    The limit of a container (cgroups v2) counts too.

    Args:
        file: Where Linux says what the machine has.
        folder: Where it says what the container may have.
    """
    known = [size for size in (_of_machine(file), _of_container(folder)) if size is not None]
    return min(known, default=None)


def _of_container(folder: Path) -> int | None:
    """Bytes left of the limit of this process' container; None where there is none."""
    limit = folder / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return None
    taken = int((folder / "memory.current").read_text())
    # files that are cached count as taken, and are given up when others need the memory
    cached = _fields(folder / "memory.stat", " ").get("inactive_file", "0")
    return max(0, int(limit.read_text()) - taken + int(cached))


def _of_machine(file: Path) -> int | None:
    """Bytes that are available on the machine."""
    available = _fields(file, ":").get("MemAvailable")
    return None if available is None else int(available.split()[0]) * 1024


def _fields(file: Path, separator: str) -> dict[str, str]:
    """What a file says, by name; nothing where there is no file."""
    if not file.exists():
        return {}
    lines = [line.partition(separator) for line in file.read_text().splitlines()]
    return {name: value for name, _, value in lines}
