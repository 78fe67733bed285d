"""The parts of a share, one after another, each in a process of its own and in its time."""

import re
import time
from collections.abc import Iterable, Sequence
from functools import partial

from asrkit.workbench import bench
from asrkit.workbench.bench.cases import NOTHING
from asrkit.workbench.bench.guards import NO_BLAME, Blame
from asrkit.workbench.bench.share import work
from asrkit.workbench.bench.share.parts import Part, budget_s
from asrkit.workbench.bench.share.processes import LOST, NO_TIME, Outcome, Process
from asrkit.workbench.bench.share.progress import Progress
from asrkit.workbench.bench.share.work import Row, SuiteRun

GRACE_S = 30  # after its time is over, before a suite is killed
RESTARTS = 3  # of a part, each without one more case or arm
LEAST_S = 5.0  # with less a part does not begin; in a run of a few minutes, a thirtieth of it


def measure_parts(progress: Progress, parts: Sequence[Part], failed: Iterable[str]) -> None:
    """Measure the parts one after another, each in its time; see `parts.budget_s`.

    Args:
        progress: of the share; its manifest gets a row for each part.
        parts: all parts, in order.
        failed: patterns of the arms whose checks failed, which are not measured.
    """
    left_out = sorted(failed)
    without = "|".join(left_out) or NOTHING.pattern
    progress.manifest["left_out"] = left_out
    rows = progress.manifest["parts"]
    for number, part in enumerate(parts):
        if part.name in rows:
            progress.tell(f"{part.name}: done before")
            continue
        todo = [one for one in parts[number:] if one.name not in rows]
        budget = budget_s(todo, progress.stop - time.monotonic())
        row = _measure_part(progress, part, without, budget)
        rows[part.name] = row
        line = f"{part.name}: {row['status']}, {row['records']} records"
        if row["why"]:
            line += f"; {row['why']}"
        progress.tell(line)
        progress.write()


def _measure_part(progress: Progress, part: Part, without: str, budget: float) -> Row:
    """Measure a part, if it can be, in so many seconds; returns its row of the manifest."""
    nothing: Row = {"status": NO_TIME, "why": "", "seconds": 0.0, "records": 0}
    if part.suite_name not in bench.SUITES or re.search(without, part.cases):
        return nothing | {"status": "not measured", "why": "its check did not pass"}
    if budget < min(LEAST_S, (progress.last - progress.begun) / 30):
        return nothing
    progress.tell(f"{part.name}, for {budget:.0f} s: {part.why}")
    begun = time.monotonic()
    before = progress.count_records()
    outcome = _run(progress, part, without, begun + budget)
    return {
        "status": outcome.status,
        "why": outcome.why,
        "seconds": round(time.monotonic() - begun, 1),
        "records": progress.count_records() - before,
    }


def _run(progress: Progress, part: Part, without: str, until: float) -> Outcome:
    """Run a part; where its process dies of a case or arm, again without that, some times."""
    lost = progress.manifest["lost"].setdefault(part.name, [])
    for restarts in range(RESTARTS + 1):
        outcome = _run_once(progress, part, without, until)
        blame = outcome.blame
        if blame == NO_BLAME:
            break
        lost.append({"case": blame.case, "arm": blame.arm, "why": outcome.why})
        if restarts == RESTARTS or time.monotonic() >= until:
            break
        progress.tell(f"{part.name}: {outcome.why}; started again without {blame}")
        progress.write()
    if not lost:
        del progress.manifest["lost"][part.name]
    elif outcome.status == "done":
        reasons = [f"{Blame(one['case'], one['arm'])}: {one['why']}" for one in lost]
        return Outcome(LOST, "; ".join(reasons))
    return outcome


def _run_once(progress: Progress, part: Part, without: str, until: float) -> Outcome:
    """How a process that measures the part has ended, at the latest a while after `until`."""
    lost = progress.manifest["lost"][part.name]
    suite_run = SuiteRun(
        out=progress.out,
        suite=part.suite_name,
        device=progress.manifest["device"],
        quick=progress.manifest["quick"],
        until=until,
        without=without,
        lost=[Blame(one["case"], one["arm"]) for one in lost],
        options=dict(part.options),
    )
    grace_s = min(GRACE_S, (progress.last - progress.begun) / 10)
    kill = min(until + grace_s, progress.last)
    process = Process(progress.log_path, partial(work.measure, suite_run))
    try:
        process.join(kill - time.monotonic())
    finally:
        outcome = process.end()
    progress.mend()
    return outcome
