"""Every suite, one after the other, each in a process of its own with a time limit.

The folder gets `bench.jsonl`, to which each record is appended when it is measured, and for every
suite `SUITE.log`, what it and its tests printed. `SUITE.done` holds the command of a suite that
ended well: the same command is not run again.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import IO, NamedTuple

from asrkit import files
from asrkit.shapes import count, expect
from benchmarks.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
BENCH = (sys.executable, "-m", "benchmarks")
LIMIT_S = 7200.0  # for each suite, where no minutes are given
LEAST_S = 20.0  # a suite with less time than this is not started
NO_TESTS = 5  # pytest's exit status where no test was selected


class Outcome(NamedTuple):
    """How a suite ended: "done", "failed", "failed its gpu tests", "stopped" at its limit, or
    "no time".
    """

    suite: str
    status: str
    seconds: float
    records: int

    def __str__(self) -> str:
        return f"{self.suite}: {self.status}, {self.seconds:.0f} s, {count(self.records, 'record')}"


def run_all(
    out: Path,
    *,
    device: str = "cpu",
    minutes: float | None = None,
    options: Sequence[str] = (),
    say: Callable[[str], object] = print,
) -> list[Outcome]:
    """Measure every suite that is not done in this folder; returns how each ended.

    On CUDA a suite's tests marked `gpu` run first, and a suite whose tests fail is not measured. A
    suite that was stopped or failed is measured again, and its records are appended again.

    Args:
        out: folder of records and logs; one run at a time.
        device: "cpu" or "cuda".
        minutes: for all suites; each takes at most half of the time left, so that none can take
            all. None: two hours each.
        options: more options of `python -m benchmarks SUITE`.
        say: called with a line before each suite, and with its outcome.
    """
    valid = minutes is None or (isfinite(minutes) and minutes > 0)
    expect(valid, "minutes", "a number above 0", minutes)
    end = inf if minutes is None else time.monotonic() + 60 * minutes
    cuda = device == "cuda"
    records = (out / "bench.jsonl").resolve()
    names = [name for name, suite in SUITES.items() if not (cuda and suite.cpu_only)]
    outcomes = []
    with files.lock(out):
        for number, name in enumerate(names, 1):
            command = [*BENCH, name, "--device", device, *options, "--out", str(records)]
            done = out / f"{name}.done"
            if done.exists() and done.read_text() == " ".join(command):
                say(f"[{number}/{len(names)}] {name}: done before")
                continue
            start = time.monotonic()
            limit_s = min(LIMIT_S, (end - start) / 2)
            before = _lines(records)
            status = "no time"
            if limit_s >= LEAST_S:
                say(f"[{number}/{len(names)}] {name}: at most {limit_s:.0f} s")
                tests = SUITES[name].gpu_tests if cuda else ()
                with (out / f"{name}.log").open("ab") as log:
                    status = _measure(command, tests, log, start + limit_s)
            if status == "done":
                done.write_text(" ".join(command))
            took_s = time.monotonic() - start
            outcomes.append(Outcome(name, status, took_s, _lines(records) - before))
            say(f"    {outcomes[-1]}")
    return outcomes


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _measure(command: Sequence[str], tests: Sequence[str], log: IO[bytes], end: float) -> str:
    """Run a suite's tests, if any, and the suite; returns its status."""
    if tests:
        status = _run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests], log, end)
        if status not in (0, NO_TESTS):
            return "failed its gpu tests"
    return {0: "done", None: "stopped"}.get(_run(command, log, end), "failed")


def _run(command: Sequence[str], log: IO[bytes], end: float) -> int | None:
    """Exit status of a command; None if its limit ended it, and all processes that it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        return process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # at the limit, and after Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
