"""Processes that tests start: waiting for them, and what they have written."""

import time
from pathlib import Path

ENOUGH_S = 240.0  # what has not come by then will not come


def running(pid):
    """Whether a process is there and has not ended: a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    """Wait for it, but not for ever."""
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def written(out):
    """When each result of a shard was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
