"""Processes of this machine that compute together, for benchmarks."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOOPBACK = {"darwin": "lo0"}  # where it is not "lo"
# Between two looks at the processes: less than another takes to fail because the first has.
LOOK_S = 0.05
# Far longer than any benchmark here takes: processes that wait for each other for ever are ended.
LIMIT_S = 1800.0


def run_ranks(
    module: str, count: int, arguments: Sequence[str], *, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Run a module as `count` processes, which meet through a file and speak over loopback.

    Args:
        module: With a `main`, for `python -m`.
        count: Processes, of one thread each.
        arguments: Of its command line.
        limit_s: Seconds that they may take, start included.

    Returns:
        The last line that rank 0 prints, as JSON.

    Raises:
        RuntimeError: A process failed, or had not ended in time, and all others were ended; the
            message is one line, with the last that it said.
    """
    from asrkit.training.processes import STORE

    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    shared["GLOO_SOCKET_IFNAME"] = LOOPBACK.get(sys.platform, "lo")
    processes = list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory(prefix="asrkit-ranks-") as name:  # mode 0700
        folder = Path(name)
        shared[STORE] = str(folder / "ranks")
        try:
            for rank in range(count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = _start([module, *arguments], {**os.environ, **shared, **own}, folder)
                processes.append(process)
            _wait(processes, folder, limit_s)
        finally:
            for process in processes:
                process.kill()  # one that has ended is left as it is
                process.wait()
        lines = (folder / "output-0").read_text().splitlines()
    return json.loads(lines[-1])


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """A rank that writes what it says to files: a pipe that nobody reads yet would fill."""
    command = [sys.executable, "-m", *arguments]
    rank = environment["RANK"]
    with (
        (folder / f"output-{rank}").open("wb") as output,
        (folder / f"errors-{rank}").open("wb") as errors,
    ):
        return subprocess.Popen(command, env=environment, stdout=output, stderr=errors)


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    """Return when all have ended well.

    Raises:
        RuntimeError: One has failed, or had not ended in time; others may still be at work.
    """
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                why = f"ended with {code}, so the others were ended"
                raise RuntimeError(f"rank {rank} of {len(codes)} {why}: {_last_said(folder, rank)}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            rank = codes.index(None)
            why = f"had not ended after {limit_s:g} s, so all were ended"
            raise RuntimeError(f"rank {rank} of {len(codes)} {why}: {_last_said(folder, rank)}")
        time.sleep(LOOK_S)


def _last_said(folder: Path, rank: int) -> str:
    """The last line that a rank wrote to stderr."""
    lines = (folder / f"errors-{rank}").read_text(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    if not said:
        return "it said nothing"
    return said[-1]
