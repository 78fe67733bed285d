"""How far a share is: its manifest, its log, the checks done, and when it has to end."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import machine, records
from asrkit.workbench.bench import guards
from asrkit.workbench.bench.share.journal import salvage
from asrkit.workbench.bench.share.parts import ELSEWHERE, Part, ends
from asrkit.workbench.bench.share.takeover import differences
from asrkit.workbench.bench.share.work import Row, read_rows

WANTED = "a new folder, or one to go on with"
OTHER_FOLDER = "Name another folder."


class Progress:
    """The state of a share, kept in its folder, from which a run that was killed continues.

    Args:
        out: the folder.
        same: device, quick, machine and source of this run; an earlier run in the folder must have
            had the same.
        parts: what is to be measured.
        minutes: after which everything has ended.
        begun: time.monotonic() at the start of the run.
        say: called with lines of text on what goes on.

    Attributes:
        manifest: what manifest.json says.
        checks: lines of checks.jsonl of this run by the name of the check, with those that passed
            in an earlier one.
        stop: time.monotonic() after which nothing begins.
        last: time.monotonic() after which nothing runs.
    """

    def __init__(
        self,
        out: Path,
        same: Row,
        parts: Sequence[Part],
        *,
        minutes: float,
        begun: float,
        say: Callable[[str], object],
    ) -> None:
        self.out = out
        self.bench_path = out / "bench.jsonl"
        self.checks_path = out / "checks.jsonl"
        self.log_path = out / "log.txt"
        self.say = say
        self.begun = begun
        stop_s, last_s = ends(60 * minutes)
        self.stop = begun + stop_s
        self.last = begun + last_s
        before = _read_manifest(out / "manifest.json", same)
        for name in records.FILES:
            (out / name).open("ab").close()  # an error comes now, not after the work
        records_lost = self.mend()
        self.manifest = _begun_manifest(before, same, parts, minutes)
        if not records_lost:  # else they may be of any part, so all parts are measured again
            self.manifest["parts"] = _done_parts(before)
        written = self._written_checks()
        self.earlier_checks = len(written)
        self.checks = {row["check"]: row for row in written if row["ok"]}

    def tell(self, line: str) -> None:
        """Say a line, with the seconds left, and log it."""
        line = f"[{max(0, self.last - time.monotonic()):4.0f} s left] {line}"
        self.say(line)
        with guards.naming(self.log_path), self.log_path.open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def mend(self) -> bool:
        """Take in what a killed process had measured; leave out records that are torn or changed.

        Returns:
            Whether any record was left out.
        """
        wrong = records.mend(self.bench_path)
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
        self.manifest["checks"] = _check_summary(self.checks)
        hashes = {}
        for name in records.FILES:
            data = (self.out / name).read_bytes()
            hashes[name] = {"bytes": len(data), "sha256": files.content_hash(data)}
        self.manifest["files"] = hashes
        self.manifest["seconds"] = round(time.monotonic() - self.begun, 1)
        path = self.out / "manifest.json"
        with guards.naming(path), files.atomic(path) as unfinished:
            unfinished.write_text(json.dumps(self.manifest, indent=1) + "\n", "utf-8")

    def read_checks(self) -> None:
        """Take in the checks that processes of this run have written."""
        for row in self._written_checks()[self.earlier_checks :]:
            self.checks[row["check"]] = row

    def failed(self, check: str) -> bool:
        """Whether the check of this name was run and failed."""
        return self.checks[check]["ok"] is False

    def count_records(self) -> int:
        """Number of records written so far."""
        return len(read_rows(self.bench_path))

    def _written_checks(self) -> list[Row]:
        """Lines of checks.jsonl, of this source."""
        source = self.manifest["source"]
        rows = read_rows(self.checks_path)
        return [row for row in rows if row.get("source") == source and "check" in row]


def _read_manifest(path: Path, same: Mapping[str, Any]) -> Row:
    """The manifest of an earlier run; empty if there was none, ValueError if it was another's."""
    if not path.exists():
        return {}
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError:
        manifest = None
    known = isinstance(manifest, dict) and isinstance(manifest.get("parts", {}), dict)
    expect(known, "out", WANTED, "one with a broken manifest.json", OTHER_FOLDER)
    other = differences(manifest, same)
    expect(not other, "out", WANTED, f"one of another {other}", OTHER_FOLDER)
    return dict(manifest)


def _begun_manifest(before: Row, same: Row, parts: Sequence[Part], minutes: float) -> Row:
    """The manifest of a run that begins, or goes on after the manifest `before`."""
    earlier = list(before.get("earlier", []))
    if before:
        keys = ("state", "minutes", "seconds", "machine")
        earlier.append({key: before.get(key) for key in keys})
    plan = {}
    for part in parts:
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
        "parts": {},
        "elsewhere": ELSEWHERE,
        "lost": before.get("lost", {}),
        "earlier": earlier,
    }


def _done_parts(manifest: Row) -> dict[str, Row]:
    parts = manifest.get("parts", {})
    return {name: part for name, part in parts.items() if part["status"] == "done"}


def _check_summary(checks: Mapping[str, Row]) -> Row:
    """How many checks passed, and why the others did not pass or were not run."""
    failed = {name: row["why"] for name, row in checks.items() if row["ok"] is False}
    not_run = {name: row["why"] for name, row in checks.items() if row["ok"] is None}
    passed = len(checks) - len(failed) - len(not_run)
    return {"passed": passed, "not_passed": failed, "not_checked": not_run}
