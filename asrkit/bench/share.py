"""A GPU machine's whole share in one command: every path against its reference, then every suite, within the minutes given.

    python -m asrkit.cli bench all --device cuda --minutes 9 --out $OUT

It works in an unpacked copy of this repository, with torch, torchaudio, numpy, numba-cuda and triton beside it, and nothing
installed. NeMo's decoders join where build/peers was taken along (asrkit.bench.peer_decoders). Checks come first: what fails one
is not measured; what there was no time to check is, for each case of a suite compares its arms before it times them. Groups of
checks and suites have processes of their own, so what crashes, hangs or takes all memory ends alone. Records are written case by
case, the manifest after each part: a run that is killed goes on where it was, in the same folder. No case begins in the last
minute; what runs still is ended then.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asrkit import bench, records
from asrkit.bench import checks
from asrkit.bench.checks import Check
from asrkit.bench.peers import installed
from asrkit.shapes import expect

CHECKS_SHARE = 0.4  # of the time, at most
CHECK_S = 150  # of one check, compiling included
GRACE_S = 30  # of a suite that is over its time
NO_TIME = "no time"
ENOUGH_S = 0.5  # of repeats of an arm: many arms rather than many repeats
Row = dict[str, Any]


class Part(NamedTuple):
    """A suite, its weight in the time that is left, and why it comes where it does."""

    name: str
    weight: float
    why: str
    suite: str = ""  # if not the name
    options: Mapping[str, Any] = {}


LADDER = {"utterances": 32, "batch": 16, "few": True}  # whose slowest arms are heard four times at least
PARTS = (
    Part("claims", 5, "what the ledger waits for: graphs, label looping, casts, half precision, front ends"),
    Part("ladder-rnnt", 2.5, "the steps together, which the summary of the series is about", "ladder", {**LADDER, "kind": "rnnt"}),
    Part("ladder-tdt", 2.5, "the same with durations", "ladder", {**LADDER, "kind": "tdt"}),
    Part("ladder-ctc", 1, "the same without a loop over labels", "ladder", {**LADDER, "kind": "ctc"}),
    Part("decoders", 2, "every loop and graph over batch sizes: which one is the default depends on it"),
    Part("losses", 2, "the kernels beside torchaudio's: which one is the default depends on it"),
    Part("encoder", 2, "most of the time of a recogniser goes here", options={"compiled": False}),
    Part("precision", 1, "what half precision costs and loses, at published sizes"),
    Part("features", 0.2, "small, and part of the claims already"),
    Part("compiled", 2, "torch.compile takes longest, so what time is left", "encoder", {"compiled": True}),
)
ELSEWHERE = {"batching": "follows from lengths by arithmetic and needs no GPU"}


def share(
    out: Path, *, device: str, minutes: float, quick: bool = False, say: Callable[[str], object] = print
) -> dict[str, Any]:  # fmt: skip
    """The manifest of a run, which `out` holds too: what was checked and measured, what was not, and why. On a CPU it is `quick`.

    ValueError if the folder holds the share of other code, of another machine, or of other arguments, or another run writes to it.
    """
    begun = time.monotonic()
    expect(0.5 <= minutes <= 1e4, "minutes", "0.5 to 10,000", minutes)
    with records.alone(out):
        run = _Run(out, device, minutes, quick or not device.startswith("cuda"), say, begun)
        try:
            run.check()
            run.measure()
            run.manifest["state"] = "ended"
        finally:
            run.write()
    return run.manifest


class _Run:
    """One share: what is known so far, and the processes that find out more."""

    def __init__(self, out: Path, device: str, minutes: float, quick: bool, say: Callable[[str], object], begun: float) -> None:
        total = 60 * minutes
        self.out, self.device, self.quick, self.say, self.begun = out, device, quick, say, begun
        self.last = begun + total - min(30.0, total / 12)  # when nothing runs any more
        self.stop = begun + total - min(60.0, total / 6)  # when nothing begins any more
        same = {"device": device, "quick": quick, "machine": records.machine(), "source": records.code()["source"]}
        before: Row = {}
        with contextlib.suppress(FileNotFoundError):
            before = json.loads((out / "manifest.json").read_text("utf-8"))
            other = [key for key in same if key != "machine" and before.get(key) != same[key]]
            other += ["machine"] * (before.get("machine", {}).get("id") != records.machine()["id"])
            expect(
                not other, "out", "a new folder, or one to go on with", f"one of another {', '.join(other)}", "Name another folder."
            )
        for name in records.FILES:
            (out / name).open("ab").close()  # found out now, not after the work
        whole = not self.mend()  # what is lost may be of any part; no case is measured twice
        parts = {name: part for name, part in before.get("parts", {}).items() if part["status"] == "done" and whole}
        self.manifest: Row = {
            "schema": "asrkit.share/1", "state": "running", "minutes": minutes, **same, "code": records.code(),
            "software": records.software(), "parts": parts, "elsewhere": ELSEWHERE,
        }  # fmt: skip
        self.dead: dict[str, int] = {}  # processes of a group, one after another, that died before they could tell anything
        self.parts = [part for part in PARTS if part.name != "compiled" or device.startswith("cuda")]  # a rehearsal need not
        self.rows = {
            row["check"]: row for row in _json_lines(out / "checks.jsonl") if row["ok"] and row["source"] == same["source"]
        }
        self.table = checks.table(device)
        self.tell(f"{len(self.table)} checks, {len(self.rows)} passed before; {len(self.parts)} parts, {len(parts)} done before")
        self.write()

    def tell(self, line: str) -> None:
        """A line with the seconds left."""
        line = f"[{max(0, self.last - time.monotonic()):4.0f} s left] {line}"
        self.say(line)
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def mend(self) -> bool:
        """Whether records were torn, as by a process that was killed, or changed; they are left out now."""
        wrong = records.mend(self.out / "bench.jsonl")
        for line in wrong:
            self.tell(f"left out {line.removeprefix(f'{self.out}/')}")  # no path is published
        return bool(wrong)

    def write(self) -> None:
        """The manifest, with the hashes of the files as they are."""
        self.mend()
        self.manifest["checks"] = {
            "passed": sum(row["ok"] is True for row in self.rows.values()),
            "not_passed": {row["check"]: row["why"] for row in self.rows.values() if row["ok"] is False},
            "not_checked": {row["check"]: row["why"] for row in self.rows.values() if row["ok"] is None},
        }
        found = {name: (self.out / name).read_bytes() for name in records.FILES}
        self.manifest["files"] = {name: {"bytes": len(data), "sha256": records.content_hash(data)} for name, data in found.items()}
        self.manifest["seconds"] = round(time.monotonic() - self.begun, 1)
        with records.atomic(self.out / "manifest.json") as part:
            part.write_text(json.dumps(self.manifest, indent=1) + "\n", "utf-8")

    def check(self) -> None:
        """All groups, some at a time; a group whose process dies goes on behind the check that it died of."""
        todo = dict[str, list[Check]]()
        for one in self.table:
            if one.name not in self.rows:
                todo.setdefault(one.group, []).append(one)
        until = min(self.stop, self.begun + CHECKS_SHARE * (self.last - self.begun))
        at_once = max(2, min(8, records.machine()["cpu_usable"] // 2))  # what they take most of is compiling
        running = dict[str, _Process]()
        try:
            while (todo or running) and time.monotonic() < until:
                for group in [*todo][: at_once - len(running)] if len(running) < at_once else []:
                    names = [one.name for one in todo.pop(group)]
                    threads = max(1, torch.get_num_threads() // at_once)
                    running[group] = _Process(self.out, partial(_check, self.out, self.device, names), threads)
                wait([process.sentinel for process in running.values()], max(0.0, until - time.monotonic()))
                for group in [group for group, process in running.items() if not process.is_alive()]:
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
                self.tell(f"not {'checked' if row['ok'] is None else 'passed'}: {row['check']}: {row['why']}")
        late = sum(row["why"] == NO_TIME for row in self.rows.values())
        passed = sum(row["ok"] is True for row in self.rows.values())
        self.tell(f"{passed} of {len(self.table)} checks passed" + f"; no time for {late}" * bool(late))
        self.write()

    def _checked(self, group: str, why: str) -> list[Check]:
        """What a process of this group has left to check; where it died, the first of that is what it died of."""
        told = {row["check"]: row for row in _json_lines(self.out / "checks.jsonl") if row["source"] == self.manifest["source"]}
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
        """The parts one after another; each may use its weight's share of the time that is left."""
        bad = {one.vouches for one in self.table if self.rows[one.name]["ok"] is False and one.vouches}
        pattern = "|".join(sorted(bad)) or r"(?!)"
        self.manifest["left_out"] = sorted(bad)
        for place, part in enumerate(self.parts):
            if part.name in self.manifest["parts"]:
                self.tell(f"{part.name}: done before")
                continue
            now = time.monotonic()
            budget = (self.stop - now) * part.weight / sum(one.weight for one in self.parts[place:])
            row: Row = {"status": "no time", "why": "", "seconds": 0.0, "records": 0}
            suite = part.suite or part.name
            if suite not in bench.SUITES or re.search(pattern, f"{suite}-"):  # all its cases begin so
                row["status"], row["why"] = "not measured", "its check did not pass"
            elif budget >= min(5.0, (self.last - self.begun) / 30):
                self.tell(f"{part.name}, for {budget:.0f} s: {part.why}")
                before = len(_json_lines(self.out / "bench.jsonl"))
                kill = min(now + budget + min(GRACE_S, (self.last - self.begun) / 10), self.last)
                work = partial(_measure, self.out, suite, self.device, self.quick, now + budget, pattern, dict(part.options))
                with contextlib.closing(_Process(self.out, work)) as process:
                    process.join(kill - time.monotonic())
                    why = process.end()
                row["status"], row["why"] = process.said or ("died", why)
                row["seconds"] = round(time.monotonic() - now, 1)
                row["records"] = len(_json_lines(self.out / "bench.jsonl")) - before
            self.manifest["parts"][part.name] = row
            self.tell(f"{part.name}: {row['status']}, {row['records']} records" + f"; {row['why']}" * bool(row["why"]))
            self.write()


class _Process:
    """Work in a process of its own, which ends with this one; `end` kills it with all it started."""

    def __init__(self, out: Path, work: Callable[[], Any], threads: int = 0) -> None:
        context = multiprocessing.get_context("forkserver")  # which imports torch once; CUDA begins in its children only
        context.set_forkserver_preload(["__main__", __name__])
        self.here, there = context.Pipe(duplex=False)
        self.said: tuple[str, str] | None = None
        self.process = context.Process(target=_begin, args=(out / "log.txt", threads or torch.get_num_threads(), work, there))
        self.process.start()
        there.close()
        self.sentinel, self.is_alive, self.join = self.process.sentinel, self.process.is_alive, self.process.join

    def end(self) -> str:
        """Why it did not end well, empty if it did; ended now if it runs still."""
        late = self.process.is_alive()
        if late:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.kill()
        self.process.join()
        with contextlib.suppress(EOFError, OSError):
            self.said = self.here.recv() if self.here.poll() else None
        if late:
            return "killed: out of time"
        code = self.process.exitcode or 0
        if code == -signal.SIGALRM:
            return f"took longer than {CHECK_S} s"
        return f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}" if code else ""

    def close(self) -> None:
        """Leaves nothing behind."""
        if self.process.is_alive():
            self.end()


def _begin(log: Path, threads: int, work: Callable[[], Any], answer: Any) -> None:
    """What a process of a share begins with: a group of its own, its output in the log, an eye on the parent."""
    os.setsid()
    with log.open("ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()  # type: ignore[union-attr]
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    answer.send(work())


def _check(out: Path, device: str, names: Sequence[str]) -> tuple[str, str]:
    """Runs the checks of these names, a line each in checks.jsonl; a device that a check broke ends the process."""
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
            if device.startswith("cuda"):
                torch.cuda.synchronize()
        except RuntimeError as error:
            ok, broken = False, f"the device is lost: {str(error).splitlines()[0]}"
        signal.alarm(0)
        records.extend(out / "checks.jsonl", _checked_row(one, ok, " ".join(filter(None, (why, broken))), time.monotonic() - begun))
        if broken:
            os._exit(0)
    return "done", ""


def _measure(
    out: Path, suite: str, device: str, quick: bool, until: float, pattern: str, options: dict[str, Any]
) -> tuple[str, str]:  # fmt: skip
    """Measures a suite into bench.jsonl; status, and why it is not "done"."""
    known = records.read(out / "bench.jsonl")
    rivals = bench.Peers() if device.startswith("cuda") and installed() else contextlib.nullcontext()
    try:
        with rivals as peers:
            bench.run(
                suite, device=device, quick=quick, out=out / "bench.jsonl", say=partial(print, flush=True), until=until,
                enough_s=ENOUGH_S, without=re.compile(pattern), done=known, peers=peers, **options,
            )  # fmt: skip
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
    source = records.code()["source"]
    return {"group": one.group, "check": one.name, "ok": ok, "why": why, "seconds": round(seconds, 3), "source": source}


def _json_lines(path: Path) -> list[Row]:
    """Whole lines of a file; what a crash tore is left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def report(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Lines that say what was measured and what was not."""
    for name, part in manifest["parts"].items():
        yield f"{name:10} {part['status']:12} {part['records']:4} records {part['seconds']:6.1f} s  {part['why']}".rstrip()
    yield from (f"{name:10} elsewhere     {why}" for name, why in manifest["elsewhere"].items())
    if manifest.get("left_out"):
        yield "left out, for their checks did not pass: " + ", ".join(manifest["left_out"])
