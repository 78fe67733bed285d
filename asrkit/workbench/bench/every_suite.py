"""Every suite, one after the other, each in a process of its own with a time limit.

The folder has `bench.jsonl`, to which each record is appended when it is measured, `SUITE.log` with
what a suite and its tests printed, and `finished.txt`, which lists the suites, and the files of
tests, that need not run again.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

from asrkit.shapes import expect
from asrkit.workbench.bench.cases import Suite
from asrkit.workbench.bench.peers.processes import COPY, PYTHON
from asrkit.workbench.bench.suites import SUITES

ROOT = Path(__file__).resolve().parents[3]
BENCH = (sys.executable, "-m", "asrkit", "bench")
LIMIT_S = 7200.0  # of a suite where no minutes are given
LEAST_S = 20.0  # a suite with less than that is not begun
RECORDS = "bench.jsonl"
FINISHED = "finished.txt"
NO_TESTS = 5  # pytest's exit status where no test was selected


class Outcome(NamedTuple):
    """How a suite ended: "done", "failed", "stopped" at its limit, or "no time"."""

    suite: str
    status: str
    seconds: float = 0.0
    records: int = 0
    note: str = ""

    def __str__(self) -> str:
        line = f"{self.suite}: {self.status}, {self.seconds:.0f} s, {self.records:,} records"
        if self.note:
            line += f"; {self.note}"
        return line


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

    Args:
        out: folder of records, logs and the list of finished suites.
        device: "cpu" or "cuda".
        minutes: for all suites; each takes at most half of what is left, so that none can take all.
            None: two hours each.
        options: of `asrkit bench SUITE`, passed on to each.
        say: called with a line before each suite, and with its outcome.
    """
    valid = minutes is None or (isfinite(minutes) and minutes > 0)
    expect(valid, "minutes", "a number above 0", minutes)
    out.mkdir(parents=True, exist_ok=True)
    end = inf if minutes is None else time.monotonic() + 60 * minutes
    cuda = device.startswith("cuda")
    suites = [suite for suite in SUITES.values() if not (cuda and suite.cpu_only)]
    finished = _finished(out)
    outcomes = []
    for number, suite in enumerate(suites, 1):
        head = f"[{number}/{len(suites)}] {suite.name}"
        if suite.name in finished:
            say(f"{head}: finished before")
            continue
        limit_s = min(LIMIT_S, (end - time.monotonic()) / 2)
        if limit_s < LEAST_S:
            outcomes.append(Outcome(suite.name, "no time"))
            continue
        say(f"{head}: at most {limit_s:.0f} s")
        outcomes.append(_measure(suite, out, device, limit_s, options))
        say(f"    {outcomes[-1]}")
        if outcomes[-1].status == "done":
            _finish(out, suite.name)
    return outcomes


def _finished(out: Path) -> set[str]:
    path = out / FINISHED
    return {*path.read_text().split()} if path.exists() else set()


def _finish(out: Path, *names: str) -> None:
    with (out / FINISHED).open("a") as file:
        file.writelines(f"{name}\n" for name in names)


def _measure(
    suite: Suite, out: Path, device: str, limit_s: float, options: Sequence[str]
) -> Outcome:
    """Test and measure one suite within its limit."""
    start = time.monotonic()
    before = _lines(out / RECORDS)
    note = ""
    with (out / f"{suite.name}.log").open("ab") as log:
        finished = _finished(out)
        files = [file for file in suite.gpu_tests if file not in finished]
        if device.startswith("cuda") and files:
            note = _lacks_tests(suite)
            if not note:
                tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files]
                status = _run(tests, log, limit_s)
                if status not in (0, NO_TESTS):
                    note = "not measured: its gpu tests fail or take too long, see the log"
                    return Outcome(suite.name, "failed", time.monotonic() - start, 0, note)
                _finish(out, *files)
        command = [*BENCH, suite.name, "--device", device, *options]
        command += ["--out", str((out / RECORDS).resolve())]
        wants_peers = suite.name == "decoders" and device.startswith("cuda")
        if wants_peers and "--peers" not in options and (COPY.is_dir() or PYTHON.exists()):
            command.append("--peers")
        status = _run(command, log, limit_s - (time.monotonic() - start))
    ended = {0: "done", None: "stopped"}.get(status, "failed")
    return Outcome(
        suite.name, ended, time.monotonic() - start, _lines(out / RECORDS) - before, note
    )


def _lacks_tests(suite: Suite) -> str:
    """Why the tests of a suite cannot run here; "" if they can."""
    if importlib.util.find_spec("pytest") is None:
        return "its gpu tests did not run: pytest is not installed"
    if not all((ROOT / test).exists() for test in suite.gpu_tests):
        return "its gpu tests did not run: no checkout here"
    return ""


def _run(command: Sequence[str], log: object, limit_s: float) -> int | None:
    """Exit status of a command; None where its limit ended it, with all processes it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        return process.wait(max(limit_s, 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and those that it started, as far as they live."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
