"""The checks of a share: groups of them side by side, each group in a process of its own."""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import NamedTuple

import torch

from asrkit.workbench import machine, records
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.share import work
from asrkit.workbench.bench.share.parts import CHECKS_SHARE
from asrkit.workbench.bench.share.processes import DIED, NO_TIME, Outcome, Process
from asrkit.workbench.bench.share.progress import Progress
from asrkit.workbench.bench.share.work import check_row

CHECK_S = 150  # that one check may take, compiling included
MOST_AT_ONCE = 8  # groups


def run_checks(progress: Progress, table: Sequence[Check]) -> None:
    """Run the checks that have not passed yet into `progress.checks`; no time is a result too.

    A group whose process dies goes on behind the check that it died of.

    Args:
        progress: of the share.
        table: all checks.
    """
    groups: dict[str, list[Check]] = {}
    for check in table:
        if check.name not in progress.checks:
            groups.setdefault(check.group, []).append(check)
    waiting = list(groups.values())
    until = progress.begun + CHECKS_SHARE * (progress.last - progress.begun)
    until = min(progress.stop, until)
    at_once = max(2, min(MOST_AT_ONCE, machine.this_machine()["cpu_usable"] // 2))
    running: list[_RunningGroup] = []
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < at_once:
                running.append(_start(progress, waiting.pop(0), at_once))
            sentinels = [one.process.sentinel for one in running]
            wait(sentinels, max(0.0, until - time.monotonic()))
            for one in [one for one in running if not one.process.is_alive()]:
                running.remove(one)
                left = _collect(progress, one.checks, one.process.end())
                if left:
                    waiting.append(left)
    finally:
        outcomes = [one.process.end() for one in running]
    for one, outcome in zip(running, outcomes, strict=True):
        waiting.append(_collect(progress, one.checks, outcome))
    for check in itertools.chain(*waiting):
        progress.checks[check.name] = check_row(check, None, NO_TIME, 0.0)
    _tell_results(progress)
    progress.write()


class _RunningGroup(NamedTuple):
    """Checks of one group, and the process that runs them."""

    checks: list[Check]
    process: Process


def _start(progress: Progress, checks: list[Check], at_once: int) -> _RunningGroup:
    """Start a process that runs checks of a group, one of so many at once."""
    names = [check.name for check in checks]
    device = progress.manifest["device"]
    threads = max(1, torch.get_num_threads() // at_once)
    run = partial(work.check_group, progress.out, device, names, CHECK_S)
    process = Process(progress.log_path, run, threads=threads, alarm_s=CHECK_S)
    return _RunningGroup(checks, process)


def _collect(progress: Progress, group: Sequence[Check], outcome: Outcome) -> list[Check]:
    """Take in what a group's process has checked; returns what is left of the group.

    If the process died, then of the first check that it has not written.
    """
    progress.read_checks()
    left = [check for check in group if check.name not in progress.checks]
    line = f"checked {group[0].group}"
    if left and outcome.status == DIED:
        line += f", {outcome.why}"
        row = check_row(left.pop(0), False, outcome.why, 0.0)
        records.extend(progress.checks_path, row)
        progress.read_checks()
    if left:
        line += f", {len(left)} to go"
    progress.tell(line)
    return left


def _tell_results(progress: Progress) -> None:
    """Say which checks did not pass, and how many did."""
    late = 0
    passed = 0
    for name, row in progress.checks.items():
        if row["why"] == NO_TIME:
            late += 1
        elif row["ok"] is None:
            progress.tell(f"not checked: {name}: {row['why']}")
        elif not row["ok"]:
            progress.tell(f"not passed: {name}: {row['why']}")
        else:
            passed += 1
    line = f"{passed} of {len(progress.checks)} checks passed"
    if late:
        line += f"; no time for {late}"
    progress.tell(line)
