"""Every suite, one after the other, each in a process of its own with a time limit.

The folder has `bench.jsonl`, to which each record is appended when it is measured, `SUITE.log` with
what a suite and its tests printed, and `finished.txt`, which lists the suites with their device and
options, and the files of tests, that need not run again.
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
from typing import IO, NamedTuple

from asrkit import files
from asrkit.shapes import count, expect
from asrkit.workbench.bench.cases import Suite
from asrkit.workbench.bench.suites import SUITES

ROOT = Path(__file__).resolve().parents[3]
BENCH = (sys.executable, "-m", "asrkit", "bench")
LIMIT_S = 7200.0  # of a suite where no minutes are given
LEAST_S = 20.0  # a suite with less than that is not begun
RECORDS = "bench.jsonl"
FINISHED = "finished.txt"
NO_TESTS = 5  # pytest's exit status where no test was selected
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


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
    """Measure every suite that is not finished in this folder; returns how each ended.

    On CUDA a suite's tests marked `gpu` run first, a file once a folder, and a suite whose tests
    fail is not measured.

    A suite that was stopped or failed is measured again, and its records are appended again.

    Args:
        out: folder of records, logs and the list of finished suites; one run at a time.
        device: "cpu" or "cuda".
        minutes: for all suites; each takes at most half of what is left, so that none can take all.
            None: two hours each.
        options: of `asrkit bench SUITE`, passed on to each.
        say: called with a line before each suite, and with its outcome.
    """
    valid = minutes is None or (isfinite(minutes) and minutes > 0)
    expect(valid, "minutes", "a number above 0", minutes)
    with files.lock(out):
        return _run_all(out, device, minutes, options, say)


def _run_all(
    out: Path,
    device: str,
    minutes: float | None,
    options: Sequence[str],
    say: Callable[[str], object],
) -> list[Outcome]:
    end = inf if minutes is None else time.monotonic() + 60 * minutes
    cuda = device == "cuda"
    suites = [suite for suite in SUITES.values() if not (cuda and suite.cpu_only)]
    outcomes = []
    for number, suite in enumerate(suites, 1):
        head = f"[{number}/{len(suites)}] {suite.name}"
        if _work(suite, device, options) in _lines(out / FINISHED):
            say(f"{head}: finished before")
            continue
        start = time.monotonic()
        limit_s = min(LIMIT_S, (end - start) / 2)
        before = len(_lines(out / RECORDS))
        status = "no time"
        if limit_s >= LEAST_S:
            say(f"{head}: at most {limit_s:.0f} s")
            status = _measure(suite, out, device, start + limit_s, options)
        records = len(_lines(out / RECORDS)) - before
        outcomes.append(Outcome(suite.name, status, time.monotonic() - start, records))
        say(f"    {outcomes[-1]}")
    return outcomes


def _work(suite: Suite, device: str, options: Sequence[str]) -> str:
    """The line of a finished suite."""
    return " ".join([suite.name, device, *options])


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _measure(suite: Suite, out: Path, device: str, end: float, options: Sequence[str]) -> str:
    """Test and measure one suite until `end`, and note if it is finished; returns its status."""
    command = [*BENCH, suite.name, "--device", device, *options]
    command += ["--out", str((out / RECORDS).resolve())]
    done = _lines(out / FINISHED)
    tests: list[str] = []
    if device == "cuda":
        tests = [file for file in suite.gpu_tests if file not in done and (ROOT / file).exists()]
    with (out / f"{suite.name}.log").open("ab") as log, (out / FINISHED).open("a") as finished:
        if tests:
            status = _run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests], log, end)
            if status not in (0, NO_TESTS):
                return "failed its gpu tests"
            print(*tests, sep="\n", file=finished, flush=True)
        status = _run(command, log, end)
        if status == 0:
            print(_work(suite, device, options), file=finished)
    return {0: "done", None: "stopped"}.get(status, "failed")


def _run(command: Sequence[str], log: IO[bytes], end: float) -> int | None:
    """Exit status of a command; None where its limit ended it, with all processes it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=_end_with_the_parent,
    )
    try:
        return process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_with_the_parent() -> None:
    """Let the system end this process when its parent ends, however that ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
