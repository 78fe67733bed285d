"""A GPU machine's whole share in one command: every path against its reference, then every suite,
within the minutes given.

    python -m asrkit bench all --device cuda --minutes 9 --out $OUT

It works in an unpacked copy of this repository with torch, torchaudio, numpy, numba-cuda and triton
beside it, and nothing installed. NeMo's decoders join where build/peers was taken along (see
asrkit.workbench.bench.rivals.peer_decoders).

Checks come first: what fails one is not measured; what there was no time to check is measured, for
each case of a suite compares its arms before it times them. Then come the parts of `share.plan`, by
the value of what they settle.

Groups of checks and parts run in processes of their own, so what crashes, hangs or takes all memory
ends alone. After an error the device has to answer. Where it does not, the process ends, and the
part is started again without the case or arm that did it, as after a crash. Records are written as
they are made, those of repeats that go on every two seconds, the manifest after each part. A run
that is killed goes on where it was, in the same folder, or in another one that takes the earlier
one over (`resume`). No case begins in the last minute; what still runs then is ended.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import bench, machine, records
from asrkit.workbench.bench import checks, guards
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.guards import Blame
from asrkit.workbench.bench.share import work
from asrkit.workbench.bench.share.journal import salvage
from asrkit.workbench.bench.share.plan import (
    CHECKS_SHARE,
    COMPILED,
    ELSEWHERE,
    PARTS,
    Part,
    budget_s,
    ends,
)
from asrkit.workbench.bench.share.processes import DIED, LOST, NOTHING, Outcome, Process
from asrkit.workbench.bench.share.takeover import differences, take_over
from asrkit.workbench.bench.share.work import Row, Task, check_row, json_lines
from asrkit.workbench.tables import aligned

CHECK_S = 150  # that one check may take, compiling included
GRACE_S = 30  # after its time is over, before a suite is killed
RESTARTS = 3  # of a part, each without one more case or arm
NO_TIME = "no time"


def share(
    out: Path,
    *,
    device: str,
    minutes: float,
    quick: bool = False,
    resume: Path | None = None,
    say: Callable[[str], object] = print,
) -> Row:
    """Check and measure everything; returns the manifest: what was measured, what not, and why.

    Args:
        out: folder for records, checks, log and manifest; a run in it is gone on with.
        device: "cpu" or "cuda".
        minutes: after which everything has ended.
        quick: small sizes and few repeats; always so on a CPU.
        resume: folder of an earlier run, which is copied into `out`, empty until then.
        say: called with lines of text on what goes on.

    Raises:
        ValueError: a folder holds the share of other code, of another kind of machine or of other
            arguments, or is not as its manifest says, or another run writes to it.
    """
    begun = time.monotonic()
    expect(0.5 <= minutes <= 1e4, "minutes", "0.5 to 10,000", minutes)
    same = {
        "device": device,
        "quick": quick or not device.startswith("cuda"),
        "machine": machine.this_machine(),
        "source": machine.code()["source"],
    }
    with files.lock(out):
        if resume:
            take_over(resume, out, same)
        run = _Share(out, minutes, same, say, begun)
        try:
            run.check()
            run.measure()
            run.manifest["state"] = "ended"
        finally:
            run.write()
    return run.manifest


class _Share:
    """The state of a share: its manifest, the checks so far, and when it has to end."""

    def __init__(
        self, out: Path, minutes: float, same: Row, say: Callable[[str], object], begun: float
    ) -> None:
        stop_s, last_s = ends(60 * minutes)
        self.out = out
        self.device: str = same["device"]
        self.say = say
        self.begun = begun
        self.stop = begun + stop_s  # nothing begins afterwards
        self.last = begun + last_s  # nothing runs afterwards
        before = _manifest(out / "manifest.json")
        other = ""
        if before:
            other = differences(before, same)
        wanted = "a new folder, or one to go on with"
        expect(not other, "out", wanted, f"one of another {other}", "Name another folder.")
        for name in records.FILES:
            (out / name).open("ab").close()  # an error comes now, not after the work
        self.parts = [
            part for part in PARTS if part.name != COMPILED or self.device.startswith("cuda")
        ]
        self.manifest = self._begin(before, minutes, same)
        self.table = checks.table(self.device)
        self.rows: dict[str, Row] = {}  # of checks, by name
        for row in self._written_checks():
            if row["ok"]:
                self.rows[row["check"]] = row
        self.deaths: dict[str, int] = {}  # of a group's processes in a row, without a check done
        self.tell(
            f"{len(self.table)} checks, {len(self.rows)} passed before;"
            f" {len(self.parts)} parts, {len(self.manifest['parts'])} done before"
        )
        self.write()

    def _begin(self, before: Row, minutes: float, same: Row) -> Row:
        """The manifest of a run that begins, or goes on after the manifest `before`."""
        kept: dict[str, Row] = {}
        if not self.mend():  # records that are lost may be of any part
            done = before.get("parts", {}).items()
            kept = {name: part for name, part in done if part["status"] == "done"}
        earlier = list(before.get("earlier", []))
        if before:
            keys = ("state", "minutes", "seconds", "machine")
            earlier.append({key: before.get(key) for key in keys})
        plan = {}
        for part in self.parts:
            plan[part.name] = {
                "why": part.why,
                "estimate_s": part.estimate_s,
                "owed_s": part.owed_s,
            }
        return {
            "schema": "asrkit.share/1",
            "state": "running",
            "minutes": minutes,
            **same,
            "code": machine.code(),
            "software": machine.software(),
            "plan": plan,
            "parts": kept,
            "elsewhere": ELSEWHERE,
            "lost": before.get("lost", {}),
            "earlier": earlier,
        }

    def tell(self, line: str) -> None:
        """Say a line, with the seconds left, and log it."""
        line = f"[{max(0, self.last - time.monotonic()):4.0f} s left] {line}"
        self.say(line)
        path = self.out / "log.txt"
        with guards.naming(path), path.open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def mend(self) -> bool:
        """Take in what a killed process had measured; leave out records that are torn or changed.

        Returns:
            Whether any record was left out.
        """
        wrong = records.mend(self.out / "bench.jsonl")
        for line in wrong:
            self.tell(f"left out {line.removeprefix(f'{self.out}/')}")  # no path is published
        kept = salvage(self.out)
        if kept:
            counts = [row["stats"]["n"] for row in kept if row["metric"] == "latency"]
            repeats = "no repeats"
            if counts:
                repeats = f"{min(counts)} to {max(counts)} repeats"
            self.tell(
                f"kept {len(kept)} records of {kept[0]['what']}, cut short:"
                f" {len(counts)} arms, {repeats}"
            )
        return bool(wrong)

    def write(self) -> None:
        """Write the manifest, with the hashes of the other files as they are."""
        self.mend()
        failed = {name: row["why"] for name, row in self.rows.items() if row["ok"] is False}
        not_run = {name: row["why"] for name, row in self.rows.items() if row["ok"] is None}
        passed = len(self.rows) - len(failed) - len(not_run)
        checked = {"passed": passed, "not_passed": failed, "not_checked": not_run}
        self.manifest["checks"] = checked
        hashes = {}
        for name in records.FILES:
            data = (self.out / name).read_bytes()
            hashes[name] = {"bytes": len(data), "sha256": files.content_hash(data)}
        self.manifest["files"] = hashes
        self.manifest["seconds"] = round(time.monotonic() - self.begun, 1)
        path = self.out / "manifest.json"
        with guards.naming(path), files.atomic(path) as part:
            part.write_text(json.dumps(self.manifest, indent=1) + "\n", "utf-8")

    def check(self) -> None:
        """Run the checks, several groups at a time.

        A group whose process dies goes on behind the check that it died of.
        """
        waiting: dict[str, list[Check]] = {}
        for check in self.table:
            if check.name not in self.rows:
                waiting.setdefault(check.group, []).append(check)
        until = min(self.stop, self.begun + CHECKS_SHARE * (self.last - self.begun))
        cores = machine.this_machine()["cpu_usable"]
        at_once = max(2, min(8, cores // 2))  # most of their time is compiling
        running: dict[str, Process] = {}
        try:
            while (waiting or running) and time.monotonic() < until:
                while waiting and len(running) < at_once:
                    group = next(iter(waiting))
                    running[group] = self._start(waiting.pop(group), at_once)
                sentinels = [process.sentinel for process in running.values()]
                wait(sentinels, max(0.0, until - time.monotonic()))
                for group in [name for name in running if not running[name].is_alive()]:
                    left = self._collect(group, running.pop(group).end())
                    if left:
                        waiting[group] = left
        finally:
            outcomes = {group: process.end() for group, process in running.items()}
        for group, outcome in outcomes.items():
            waiting[group] = self._collect(group, outcome)
        for check in itertools.chain(*waiting.values()):
            self.rows[check.name] = check_row(check, None, NO_TIME, 0.0)
        self._tell_checks()
        self.write()

    def _start(self, group: Sequence[Check], at_once: int) -> Process:
        """A process that runs the checks of a group, one of so many at once."""
        names = [check.name for check in group]
        threads = max(1, torch.get_num_threads() // at_once)
        run = partial(work.check_group, self.out, self.device, names, CHECK_S)
        return Process(self.out / "log.txt", run, threads=threads, alarm_s=CHECK_S)

    def _collect(self, group: str, outcome: Outcome) -> list[Check]:
        """Take in what a group's process has checked; returns what is left of the group.

        If it died, it did so in the first check of what is left. One that dies again without having
        done a check is not started for a third time.
        """
        written = {row["check"]: row for row in self._written_checks()}
        progress = False
        left = []
        for check in self.table:
            if check.group != group or check.name in self.rows:
                continue
            if check.name in written:
                self.rows[check.name] = written[check.name]
                progress = True
            else:
                left.append(check)
        why = ""
        if left and outcome.status == DIED:
            why = f": {outcome.why}"
            deaths = 0
            if not progress:
                deaths = self.deaths.get(group, 0) + 1
            self.deaths[group] = deaths
            blamed = left[:1]
            if deaths > 1:
                blamed = left
            for check in blamed:
                self.rows[check.name] = check_row(check, False, outcome.why, 0.0)
                records.extend(self.out / "checks.jsonl", self.rows[check.name])
            left = left[len(blamed) :]
        to_go = ""
        if left:
            to_go = f", {len(left)} to go"
        self.tell(f"checked {group}{to_go}{why}")
        return left

    def _written_checks(self) -> list[Row]:
        """Lines of checks.jsonl, of this source."""
        rows = json_lines(self.out / "checks.jsonl")
        source = self.manifest["source"]
        return [row for row in rows if row.get("source") == source and "check" in row]

    def _tell_checks(self) -> None:
        late = 0
        for name, row in self.rows.items():
            if row["why"] == NO_TIME:
                late += 1
            elif not row["ok"]:
                verb = "passed"
                if row["ok"] is None:
                    verb = "checked"
                self.tell(f"not {verb}: {name}: {row['why']}")
        passed = sum(row["ok"] is True for row in self.rows.values())
        no_time = ""
        if late:
            no_time = f"; no time for {late}"
        self.tell(f"{passed} of {len(self.table)} checks passed{no_time}")

    def measure(self) -> None:
        """Measure the parts one after another, each in its time; see plan.budget_s."""
        failed = {
            check.vouches
            for check in self.table
            if check.vouches and self.rows[check.name]["ok"] is False
        }
        without = "|".join(sorted(failed)) or r"(?!)"
        self.manifest["left_out"] = sorted(failed)
        parts = self.manifest["parts"]
        for number, part in enumerate(self.parts):
            if part.name in parts:
                self.tell(f"{part.name}: done before")
                continue
            todo = [one for one in self.parts[number:] if one.name not in parts]
            budget = budget_s(todo, self.stop - time.monotonic())
            row = parts[part.name] = self._part(part, without, budget)
            why = f"; {row['why']}" if row["why"] else ""
            self.tell(f"{part.name}: {row['status']}, {row['records']} records{why}")
            self.write()

    def _part(self, part: Part, without: str, budget: float) -> Row:
        """Measure a part, if it can be, in so many seconds; returns its row of the manifest."""
        row: Row = {"status": NO_TIME, "why": "", "seconds": 0.0, "records": 0}
        if (part.suite or part.name) not in bench.SUITES or re.search(without, part.cases):
            return row | {"status": "not measured", "why": "its check did not pass"}
        if budget < min(5.0, (self.last - self.begun) / 30):
            return row
        self.tell(f"{part.name}, for {budget:.0f} s: {part.why}")
        begun = time.monotonic()
        before = len(json_lines(self.out / "bench.jsonl"))
        outcome = self._run(part, without, begun + budget)
        made = len(json_lines(self.out / "bench.jsonl")) - before
        seconds = round(time.monotonic() - begun, 1)
        return {
            "status": outcome.status,
            "why": outcome.why,
            "seconds": seconds,
            "records": made,
        }

    def _run(self, part: Part, without: str, until: float) -> Outcome:
        """Run a part in a process; where that dies of a case, again without it, some times."""
        kill = min(until + min(GRACE_S, (self.last - self.begun) / 10), self.last)
        lost = self.manifest["lost"].get(part.name, [])
        for restarts in range(RESTARTS + 1):
            task = Task(
                out=self.out,
                suite=part.suite or part.name,
                device=self.device,
                quick=self.manifest["quick"],
                until=until,
                without=without,
                lost=[Blame(one["case"], one["arm"]) for one in lost],
                options=dict(part.options),
            )
            process = Process(self.out / "log.txt", partial(work.measure, task))
            try:
                process.join(kill - time.monotonic())
            finally:
                outcome = process.end()
            self.mend()
            blame = outcome.blame
            if blame == NOTHING:
                break
            lost = [*lost, {"case": blame.case, "arm": blame.arm, "why": outcome.why}]
            self.manifest["lost"][part.name] = lost
            if restarts == RESTARTS or time.monotonic() >= until:
                break
            self.tell(f"{part.name}: {outcome.why}; started again without {blame}")
            self.write()
        if lost and outcome.status == "done":
            reasons = [f"{Blame(one['case'], one['arm'])}: {one['why']}" for one in lost]
            return Outcome(LOST, "; ".join(reasons))
        return outcome


def _manifest(path: Path) -> Row:
    """The manifest of an earlier run, empty if there was none; ValueError for any other file."""
    manifest: Any = {}
    if path.exists():
        try:
            manifest = json.loads(path.read_bytes())
        except ValueError:
            manifest = None
    known = isinstance(manifest, dict) and isinstance(manifest.get("parts", {}), dict)
    wanted = "a new folder, or one to go on with"
    expect(known, "out", wanted, "one with a broken manifest.json", "Name another folder.")
    return manifest


def report(manifest: Mapping[str, Any]) -> list[str]:
    """Lines that say what was measured and what was not."""
    rows = []
    for name, part in manifest["parts"].items():
        made = f"{part['records']} records"
        rows.append([name, part["status"], made, f"{part['seconds']:.1f} s", part["why"]])
    for name, why in manifest["elsewhere"].items():
        rows.append([name, "elsewhere", "", "", why])
    lines = aligned(rows, right=[2, 3])
    if manifest.get("left_out"):
        names = ", ".join(manifest["left_out"])
        lines.append(f"left out, for their checks did not pass: {names}")
    return lines
