"""A GPU machine's whole share in one command: every path against its reference, then every suite,
within the minutes given.

    python -m asrkit bench all --device cuda --minutes 9 --out $OUT

It works in an unpacked copy of this repository, with torch, torchaudio, numpy, numba-cuda and
triton beside it, and nothing installed. NeMo's decoders join where build/peers was taken along
(asrkit.workbench.bench.rivals.peer_decoders). Checks come first: what fails one is not measured;
what there was no time to check is, for each case of a suite compares its arms before it times them.
Then come the parts of asrkit.workbench.bench.plan, by the value of what they settle.

Groups of checks and parts have processes of their own, so what crashes, hangs or takes all memory
ends alone. After an error the device has to answer: where it does not, the process ends, and as
after a crash the part is started again without the case, or the arm, that did it. Records are
written as they are made, those of repeats that go on every two seconds, the manifest after each
part: a run that is killed goes on where it was, in the same folder, or in another one that takes
the earlier one over (`resume`). No case begins in the last minute; what runs still is ended then.
"""

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from asrkit.workbench.bench.guards import Blame, DeviceLost
from asrkit.workbench.bench.rivals.peers import installed
from asrkit.workbench.bench.share.journal import Journal, salvage
from asrkit.workbench.bench.share.plan import CHECKS_SHARE, ELSEWHERE, PARTS, Part, budget_s, ends
from asrkit.workbench.bench.share.processes import LOST, NOTHING, Process, Tell
from asrkit.workbench.bench.share.takeover import another, take_over

CHECK_S = 150  # of one check, compiling included
GRACE_S = 30  # of a suite that is over its time
RESTARTS = 3  # of a part, each without one more case or arm
NO_TIME = "no time"
ENOUGH_S = 0.5  # of repeats of an arm: many arms rather than many repeats
Row = dict[str, Any]


def share(
    out: Path,
    *,
    device: str,
    minutes: float,
    quick: bool = False,
    resume: Path | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """The manifest of a run, which `out` holds too: what was checked and measured, what was not,
    and why. On a CPU it is `quick`.

    `resume`: the folder of an earlier run, which is copied into `out`, empty until then, and gone
    on with. ValueError if a folder holds the share of other code, of another kind of machine, or of
    other arguments, if it is not as its manifest says, or if another run writes to it.
    """
    begun = time.monotonic()
    expect(0.5 <= minutes <= 1e4, "minutes", "0.5 to 10,000", minutes)
    quick = quick or not device.startswith("cuda")
    same = {
        "device": device,
        "quick": quick,
        "machine": machine.this_machine(),
        "source": machine.code()["source"],
    }
    with files.lock(out):
        if resume:
            take_over(resume, out, same)
        run = _Run(out, minutes, same, say, begun)
        try:
            run.check()
            run.measure()
            run.manifest["state"] = "ended"
        finally:
            run.write()
    return run.manifest


class _Run:
    """One share: what is known so far, and the processes that find out more."""

    def __init__(
        self, out: Path, minutes: float, same: Row, say: Callable[[str], object], begun: float
    ) -> None:
        stop, last = ends(60 * minutes)
        self.out, self.device, self.quick, self.say, self.begun = (
            out,
            same["device"],
            same["quick"],
            say,
            begun,
        )
        self.stop, self.last = (
            begun + stop,
            begun + last,
        )  # when nothing begins, and when nothing runs any more
        before = _manifest(out / "manifest.json")
        other = another(before, same) if before else ""
        expect(
            not other,
            "out",
            "a new folder, or one to go on with",
            f"one of another {other}",
            "Name another folder.",
        )
        for name in records.FILES:
            (out / name).open("ab").close()  # found out now, not after the work
        whole = not self.mend()  # what is lost may be of any part; no case is measured twice
        parts = {
            name: part
            for name, part in before.get("parts", {}).items()
            if part["status"] == "done" and whole
        }
        earlier = (
            [{key: before.get(key) for key in ("state", "minutes", "seconds", "machine")}]
            if before
            else []
        )
        self.parts = [
            part for part in PARTS if part.name != "compiled" or self.device.startswith("cuda")
        ]  # a rehearsal need not
        plan = {
            part.name: {"why": part.why, "estimate_s": part.estimate_s, "owed_s": part.owed_s}
            for part in self.parts
        }
        self.manifest: Row = {
            "schema": "asrkit.share/1",
            "state": "running",
            "minutes": minutes,
            **same,
            "code": machine.code(),
            "software": machine.software(),
            "plan": plan,
            "parts": parts,
            "elsewhere": ELSEWHERE,
            "lost": before.get("lost", {}),
            "earlier": [*before.get("earlier", []), *earlier],
        }
        self.dead: dict[
            str, int
        ] = {}  # processes of a group, one after another, that died before they could tell anything
        self.rows = {
            row["check"]: row
            for row in _json_lines(out / "checks.jsonl")
            if row.get("ok") and row.get("source") == same["source"] and "check" in row
        }
        self.table = checks.table(self.device)
        self.tell(
            f"{len(self.table)} checks, {len(self.rows)} passed before; {len(self.parts)} parts, {len(parts)} done before"
        )
        self.write()

    def tell(self, line: str) -> None:
        """A line with the seconds left."""
        line = f"[{max(0, self.last - time.monotonic()):4.0f} s left] {line}"
        self.say(line)
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def mend(self) -> bool:
        """Whether records were torn, as by a process that was killed, or changed; they are left out
        now.

        What a killed process had measured of a case is taken in.
        """
        wrong = records.mend(self.out / "bench.jsonl")
        for line in wrong:
            self.tell(f"left out {line.removeprefix(f'{self.out}/')}")  # no path is published
        if left := salvage(self.out):
            arms = {one["impl"]: one["stats"]["n"] for one in left if one["metric"] == "latency"}
            repeats = (
                f"{min(arms.values())} to {max(arms.values())} repeats" if arms else "no repeats"
            )
            self.tell(
                f"kept {len(left)} records of {left[0]['what']}, cut short: {len(arms)} arms, {repeats}"
            )
        return bool(wrong)

    def write(self) -> None:
        """The manifest, with the hashes of the files as they are."""
        self.mend()
        self.manifest["checks"] = {
            "passed": sum(row["ok"] is True for row in self.rows.values()),
            "not_passed": {
                row["check"]: row["why"] for row in self.rows.values() if row["ok"] is False
            },
            "not_checked": {
                row["check"]: row["why"] for row in self.rows.values() if row["ok"] is None
            },
        }
        found = {name: (self.out / name).read_bytes() for name in records.FILES}
        self.manifest["files"] = {
            name: {"bytes": len(data), "sha256": files.content_hash(data)}
            for name, data in found.items()
        }
        self.manifest["seconds"] = round(time.monotonic() - self.begun, 1)
        with files.atomic(self.out / "manifest.json") as part:
            part.write_text(json.dumps(self.manifest, indent=1) + "\n", "utf-8")

    def check(self) -> None:
        """All groups, some at a time; a group whose process dies goes on behind the check that it
        died of.
        """
        todo = dict[str, list[Check]]()
        for one in self.table:
            if one.name not in self.rows:
                todo.setdefault(one.group, []).append(one)
        until = min(self.stop, self.begun + CHECKS_SHARE * (self.last - self.begun))
        at_once = max(
            2, min(8, machine.this_machine()["cpu_usable"] // 2)
        )  # what they take most of is compiling
        running = dict[str, Process]()
        try:
            while (todo or running) and time.monotonic() < until:
                for group in [*todo][: at_once - len(running)] if len(running) < at_once else []:
                    names = [one.name for one in todo.pop(group)]
                    threads = max(1, torch.get_num_threads() // at_once)
                    work = partial(_check, self.out, self.device, names)
                    running[group] = Process(
                        self.out / "log.txt", work, threads=threads, alarm_s=CHECK_S
                    )
                wait(
                    [process.sentinel for process in running.values()],
                    max(0.0, until - time.monotonic()),
                )
                for group in [
                    group for group, process in running.items() if not process.is_alive()
                ]:
                    why = running.pop(group).end()
                    if left := self._checked(group, why):
                        todo[group] = left
        finally:
            for process in running.values():
                process.end()
        for group in running:
            todo[group] = self._checked(group, "")
        for one in (one for left in todo.values() for one in left):
            self.rows[one.name] = _checked_row(one, None, NO_TIME, 0.0)
        for row in self.rows.values():
            if not row["ok"] and row["why"] != NO_TIME:
                self.tell(
                    f"not {'checked' if row['ok'] is None else 'passed'}: {row['check']}: {row['why']}"
                )
        late = sum(row["why"] == NO_TIME for row in self.rows.values())
        passed = sum(row["ok"] is True for row in self.rows.values())
        self.tell(
            f"{passed} of {len(self.table)} checks passed" + f"; no time for {late}" * bool(late)
        )
        self.write()

    def _checked(self, group: str, why: str) -> list[Check]:
        """What a process of this group has left to check; where it died, the first of that is what
        it died of.
        """
        told = {
            row["check"]: row
            for row in _json_lines(self.out / "checks.jsonl")
            if row["source"] == self.manifest["source"]
        }
        left = list[Check]()
        names = {one.name for one in self.table if one.group == group and one.name not in self.rows}
        for one in self.table:
            if one.name in names:
                if one.name in told:
                    self.rows[one.name] = told[one.name]
                else:
                    left.append(one)
        if left and why:
            self.dead[group] = 0 if told.keys() & names else self.dead.get(group, 0) + 1
            for one in left if self.dead[group] > 1 else left[:1]:
                self._row(one, False, why)
            left = [one for one in left if one.name not in self.rows]
        self.tell(f"checked {group}" + f", {len(left)} to go" * bool(left) + f": {why}" * bool(why))
        return left

    def _row(self, one: Check, ok: bool | None, why: str) -> None:
        self.rows[one.name] = _checked_row(one, ok, why, 0.0)
        records.extend(self.out / "checks.jsonl", self.rows[one.name])

    def measure(self) -> None:
        """The parts one after another, each in its time; see plan.budget_s."""
        bad = {
            one.vouches for one in self.table if self.rows[one.name]["ok"] is False and one.vouches
        }
        pattern = "|".join(sorted(bad)) or r"(?!)"
        self.manifest["left_out"] = sorted(bad)
        for place, part in enumerate(self.parts):
            if part.name in self.manifest["parts"]:
                self.tell(f"{part.name}: done before")
                continue
            ahead = [one for one in self.parts[place:] if one.name not in self.manifest["parts"]]
            budget = budget_s(ahead, self.stop - time.monotonic())
            row: Row = {"status": "no time", "why": "", "seconds": 0.0, "records": 0}
            suite = part.suite or part.name
            if suite not in bench.SUITES or re.search(pattern, part.cases):
                row["status"], row["why"] = "not measured", "its check did not pass"
            elif budget >= min(5.0, (self.last - self.begun) / 30):
                self.tell(f"{part.name}, for {budget:.0f} s: {part.why}")
                before = len(_json_lines(self.out / "bench.jsonl"))
                row |= self._measured(part, pattern, budget)
                row["records"] = len(_json_lines(self.out / "bench.jsonl")) - before
            self.manifest["parts"][part.name] = row
            self.tell(
                f"{part.name}: {row['status']}, {row['records']} records"
                + f"; {row['why']}" * bool(row["why"])
            )
            self.write()

    def _measured(self, part: Part, pattern: str, budget: float) -> Row:
        """A part in a process of its own; where that dies at a case or loses its device, again
        without it, some times at most.
        """
        begun, lost = time.monotonic(), self.manifest["lost"].get(part.name, [])
        until = begun + budget
        kill = min(until + min(GRACE_S, (self.last - self.begun) / 10), self.last)
        for restarts in range(RESTARTS + 1):
            blamed = [Blame(one["case"], one["arm"]) for one in lost]
            suite, options = part.suite or part.name, dict(part.options)
            work = partial(
                _measure, self.out, suite, self.device, self.quick, until, pattern, options, blamed
            )
            with contextlib.closing(Process(self.out / "log.txt", work)) as process:
                process.join(kill - time.monotonic())
                why = process.end()
            status, why = process.said or ("died", why)
            self.mend()
            if process.blame == NOTHING:
                break
            lost = [*lost, {"case": process.blame.case, "arm": process.blame.arm, "why": why}]
            self.manifest["lost"][part.name] = lost
            if restarts == RESTARTS or time.monotonic() >= until:
                break
            self.tell(f"{part.name}: {why}; started again without {process.blame}")
            self.write()
        if lost and status == "done":
            status, why = (
                LOST,
                "; ".join(f"{Blame(one['case'], one['arm'])}: {one['why']}" for one in lost),
            )
        return {"status": status, "why": why, "seconds": round(time.monotonic() - begun, 1)}


def _check(out: Path, device: str, names: Sequence[str], tell: Tell) -> tuple[str, str]:
    """Runs the checks of these names, a line each in checks.jsonl; a device that a check broke ends
    the process.
    """
    table = {one.name: one for one in checks.table(device)}
    for one in map(table.__getitem__, names):
        begun, why, ok = time.monotonic(), "", True
        signal.alarm(CHECK_S)  # ends this process even where Python does not run
        try:
            one.call()
        except ModuleNotFoundError as error:
            ok, why = None, str(error)  # type: ignore[assignment]
        except Exception as error:
            ok, why = False, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        broken = ""
        try:
            guards.prove_alive(device, one.name)
        except DeviceLost as error:
            ok, broken = False, error.why
        signal.alarm(0)
        records.extend(
            out / "checks.jsonl",
            _checked_row(one, ok, " ".join(filter(None, (why, broken))), time.monotonic() - begun),
        )
        if broken:
            return LOST, broken
    return "done", ""


def _measure(
    out: Path,
    suite: str,
    device: str,
    quick: bool,
    until: float,
    pattern: str,
    options: dict[str, Any],
    lost: Sequence[Blame],
    tell: Tell,
) -> tuple[str, str]:
    """Measures a suite into bench.jsonl; status, and why it is not "done". `tell` learns which case
    and arm it is at.
    """
    known = records.read(out / "bench.jsonl")
    rivals = (
        bench.Peers() if device.startswith("cuda") and installed() else contextlib.nullcontext()
    )
    try:
        with rivals as peers:
            bench.run(
                suite,
                device=device,
                quick=quick,
                out=out / "bench.jsonl",
                say=partial(print, flush=True),
                until=until,
                enough_s=ENOUGH_S,
                without=re.compile(pattern),
                done=known,
                lost=lost,
                note=tell,
                journal=Journal(out),
                peers=peers,
                **options,
            )
    except DeviceLost as error:
        tell(error.blame)
        return LOST, error.why
    except TimeoutError as error:
        return "stopped", str(error)
    except AssertionError as error:
        return "disagreed", " ".join(str(error).split())[:2000]
    except Exception as error:
        import traceback

        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
    return "done", ""


def _checked_row(one: Check, ok: bool | None, why: str, seconds: float) -> Row:
    source = machine.code()["source"]
    return {
        "group": one.group,
        "check": one.name,
        "ok": ok,
        "why": why,
        "seconds": round(seconds, 3),
        "source": source,
    }


def _manifest(path: Path) -> Row:
    """The manifest of an earlier run in this folder, empty if there was none; ValueError for a file
    that is none.
    """
    found: Any = {}
    if path.exists():
        try:
            found = json.loads(path.read_bytes())
        except ValueError:
            found = None
    known = isinstance(found, dict) and isinstance(found.get("parts", {}), dict)
    expect(
        known,
        "out",
        "a new folder, or one to go on with",
        "one with a broken manifest.json",
        "Name another folder.",
    )
    return found


def _json_lines(path: Path) -> list[Row]:
    """Whole lines of a file; what a crash tore, and what is no object, is left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def report(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Lines that say what was measured and what was not."""
    for name, part in manifest["parts"].items():
        yield f"{name:12} {part['status']:12} {part['records']:4} records {part['seconds']:6.1f} s  {part['why']}".rstrip()
    yield from (f"{name:12} elsewhere     {why}" for name, why in manifest["elsewhere"].items())
    if manifest.get("left_out"):
        yield "left out, for their checks did not pass: " + ", ".join(manifest["left_out"])
