"""Run every suite in turn, each in its own process with a time limit.

Files in the output folder:

    bench.jsonl   records, appended as they are measured
    SUITE.log     output of a suite and of its tests
    SUITE.done    command of a suite that finished; the same command is not run again
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import IO

from asrkit import files
from asrkit.shapes import expect
from benchmarks.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
BENCH = (sys.executable, "-m", "benchmarks")
LIMIT_S = 7200.0  # for each suite
LEAST_S = 20.0  # a suite with less time than this is not started
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


def run_all(
    out: Path,
    *,
    device: str = "cpu",
    minutes: float | None = None,
    options: Sequence[str] = (),
    log: Callable[[str], object] = print,
) -> dict[str, str]:
    """Measure every suite that is not finished in this folder, except those with a table of their
    own.

    On CUDA the tests of a suite that are marked `gpu` run first; if one fails, the suite is not
    measured. Only a suite that finished is skipped next time. Any other is measured again, and its
    records are appended again.

    Args:
        out: folder of records and logs; one run at a time.
        device: "cpu" or "cuda".
        minutes: limit for all suites; each may take half of the time that is left. None: no limit
            but the two hours that each suite has.
        options: more options of `python -m benchmarks SUITE`.
        log: called with a line before and after each suite.

    Returns:
        By suite "done", "failed", "failed its gpu tests", "stopped" (at its limit) or "no time".
    """
    valid = minutes is None or (isfinite(minutes) and minutes > 0)
    expect(valid, "minutes", "a number above 0", minutes)
    end = inf if minutes is None else time.monotonic() + 60 * minutes
    status: dict[str, str] = {}
    with files.lock(out):
        for name, suite in SUITES.items():
            command = [*BENCH, name, "--device", device, *options]
            command += ["--out", str((out / "bench.jsonl").resolve())]
            finished = out / f"{name}.done"
            if suite.rows or (device == "cuda" and suite.cpu_only):
                continue
            if finished.exists() and finished.read_text() == " ".join(command):
                log(f"{name}: done before")
                continue
            now = time.monotonic()
            limit_s = min(LIMIT_S, (end - now) / 2)
            if limit_s < LEAST_S:
                status[name] = "no time"
                continue
            log(f"{name}: at most {limit_s:.0f} s")
            tests = suite.gpu_tests if device == "cuda" else ()
            with (out / f"{name}.log").open("ab") as output:
                status[name] = _measure(command, tests, output, now + limit_s)
            log(f"{name}: {status[name]}")
            if status[name] == "done":
                finished.write_text(" ".join(command))
    return status


def _measure(command: Sequence[str], tests: Sequence[str], output: IO[bytes], end: float) -> str:
    """Run the tests of a suite, if any, then the suite; returns its status."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    if tests and _run([*pytest, *tests], output, end) != 0:
        return "failed its gpu tests"
    return {0: "done", None: "stopped"}.get(_run(command, output, end), "failed")


def _run(command: Sequence[str], output: IO[bytes], end: float) -> int | None:
    """Exit status of a command; None if it and its children were killed at the time limit."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        return process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # also children that outlived it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_with_parent() -> None:
    """Let Linux end this process when its parent ends, so that no suite outlives the run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
