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
TESTS_SHARE = 1 / 3  # share of a suite's time that its gpu tests may take
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

    On CUDA the tests of a suite that are marked `gpu` run first, and its status says whether they
    passed. It is measured anyway: an arm that disagrees with its reference is never timed. Only a
    suite that finished is skipped next time. Any other is measured again, and its records are
    appended again.

    Args:
        out: folder of records and logs; one run at a time.
        device: "cpu" or "cuda".
        minutes: limit for all suites, divided by their `Suite.share`; time that a suite does not
            use is left to the next ones. None: no limit but the two hours that each suite has.
        options: more options of `python -m benchmarks SUITE`.
        log: called with a line before and after each suite.

    Returns:
        By suite "done", "failed", "stopped" (at its limit) or "no time"; with ", gpu tests failed"
        or ", gpu tests stopped" if they did not pass.
    """
    valid = minutes is None or (isfinite(minutes) and minutes > 0)
    expect(valid, "minutes", "a number above 0", minutes)
    end = inf if minutes is None else time.monotonic() + 60 * minutes
    status: dict[str, str] = {}
    with files.lock(out):
        waiting = [suite for suite in SUITES.values() if not suite.rows]
        if device == "cuda":
            waiting = [suite for suite in waiting if not suite.cpu_only]
        while waiting:
            suite, *waiting = waiting
            command = [*BENCH, suite.name, "--device", device, *options]
            command += ["--out", str((out / "bench.jsonl").resolve())]
            finished = out / f"{suite.name}.done"
            if finished.exists() and finished.read_text() == " ".join(command):
                log(f"{suite.name}: done before")
                continue
            share = suite.share / (suite.share + sum(other.share for other in waiting))
            now = time.monotonic()
            limit_s = min(LIMIT_S, (end - now) * share)
            if limit_s < LEAST_S:
                status[suite.name] = "no time"
                continue
            log(f"{suite.name}: at most {limit_s:.0f} s")
            tests = suite.gpu_tests if device == "cuda" else ()
            with (out / f"{suite.name}.log").open("ab") as output:
                status[suite.name] = _measure(command, tests, output, now, limit_s)
            log(f"{suite.name}: {status[suite.name]}")
            if status[suite.name] == "done":
                finished.write_text(" ".join(command))
    return status


def _measure(
    command: Sequence[str], tests: Sequence[str], output: IO[bytes], begin: float, limit_s: float
) -> str:
    """Run the tests of a suite, if any, then the suite; returns its status."""
    tested: int | None = 0
    if tests:
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests]
        tested = _run(pytest, output, begin + TESTS_SHARE * limit_s)
    measured = _run(command, output, begin + limit_s)
    status = {0: "done", None: "stopped"}.get(measured, "failed")
    return status + {0: "", None: ", gpu tests stopped"}.get(tested, ", gpu tests failed")


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
