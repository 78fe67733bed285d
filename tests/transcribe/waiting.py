"""Processes that tests start: waiting for them, and the results that they wrote."""

import time
from pathlib import Path

ENOUGH_S = 240.0  # no condition takes longer


def running(pid):
    """Whether a process exists and has not ended; a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    """Wait for a condition, but not for ever."""
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def written(out):
    """The time at which each result of a shard was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
