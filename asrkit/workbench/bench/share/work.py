"""What the processes of a share do: run a group of checks, or measure a suite."""

import contextlib
import json
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asrkit.workbench import bench, machine, records
from asrkit.workbench.bench import checks, guards
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.guards import Blame, DeviceLost
from asrkit.workbench.bench.peers.processes import installed
from asrkit.workbench.bench.share.journal import Journal
from asrkit.workbench.bench.share.processes import LOST, NO_PACKAGE, STOPPED, Tell

ENOUGH_S = 0.5  # of repeats of an arm: many arms rather than many repeats
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """A suite to measure in a process.

    Attributes:
        out: folder of the share.
        suite: by its name; this and the other fields are arguments of `bench.run`.
    """

    out: Path
    suite: str
    device: str
    quick: bool
    until: float
    without: str
    lost: Sequence[Blame]
    options: Mapping[str, Any]


def check_group(
    out: Path, device: str, names: Sequence[str], most_s: int, tell: Tell
) -> tuple[str, str]:
    """Run the checks of these names; returns a status, and why that is not "done".

    A device that a check broke ends the work.

    Args:
        out: folder of the share; its checks.jsonl gets a line for each check.
        device: of the checks.
        names: checks of one group, in order.
        most_s: seconds that one may take; a longer one ends the process, even outside Python.
        tell: takes the case that work is at, of which checks have none.
    """
    table = {check.name: check for check in checks.table(device)}
    for name in names:
        begun = time.monotonic()
        signal.alarm(most_s)
        ok, why = _outcome(table[name])
        broken = ""
        try:
            guards.prove_alive(device, name)
        except DeviceLost as error:
            ok = False
            broken = error.why
        signal.alarm(0)
        why = " ".join(filter(None, (why, broken)))
        row = check_row(table[name], ok, why, time.monotonic() - begun)
        with guards.naming(out / "checks.jsonl"):
            records.extend(out / "checks.jsonl", row)
        if broken:
            return LOST, broken
    return "done", ""


def _outcome(check: Check) -> tuple[bool | None, str]:
    """Whether a check passes, None if it cannot run here, and why not."""
    try:
        check.call()
    except ModuleNotFoundError as error:
        return None, str(error)
    except Exception as error:
        return False, f"{type(error).__name__}: {one_line(error, 500)}"
    return True, ""


def measure(suite_run: SuiteRun, tell: Tell) -> tuple[str, str]:
    """Measure a suite into bench.jsonl; returns a status, and why that is not "done".

    Args:
        suite_run: what to measure.
        tell: takes the case and arm that work is at.
    """
    out = suite_run.out / "bench.jsonl"
    processes: Any = contextlib.nullcontext()
    if suite_run.device.startswith("cuda") and installed():
        processes = bench.Peers()
    try:
        with processes as peers:
            bench.run(
                suite_run.suite,
                device=suite_run.device,
                quick=suite_run.quick,
                out=out,
                say=partial(print, flush=True),
                until=suite_run.until,
                enough_s=ENOUGH_S,
                without=re.compile(suite_run.without),
                done=records.read(out),
                lost=suite_run.lost,
                note=tell,
                journal=Journal(suite_run.out),
                peers=peers,
                **suite_run.options,
            )
    except DeviceLost as error:
        tell(error.blame)
        return LOST, error.why
    except TimeoutError as error:
        return STOPPED, str(error)
    except ModuleNotFoundError as error:
        return NO_PACKAGE, str(error)
    except AssertionError as error:
        return "disagreed", one_line(error, 2000)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {one_line(error, 1000)}"
    return "done", ""


def one_line(error: Exception, most: int) -> str:
    """The message of an error on one line, of so many characters at most."""
    return " ".join(str(error).split())[:most]


def check_row(check: Check, ok: bool | None, why: str, seconds: float) -> Row:
    """The line of checks.jsonl for a check.

    Args:
        check: the check.
        ok: whether it passed; None if it was not run.
        why: why it did not pass.
        seconds: that it took.
    """
    return {
        "group": check.group,
        "check": check.name,
        "ok": ok,
        "why": why,
        "seconds": round(seconds, 3),
        "source": machine.code()["source"],
    }


def read_rows(path: Path) -> list[Row]:
    """The whole objects among the lines of a file; what a crash tore is left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows
