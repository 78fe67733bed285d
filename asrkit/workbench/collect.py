"""Take measured records into the repository: from folders of `asrkit bench all` and from files."""

import contextlib
import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asrkit.files import atomic, content_hash, lock
from asrkit.shapes import expect
from asrkit.workbench.machine import commit_of, has_commit
from asrkit.workbench.records import FILES, checked_lines, expect_validator, json_lines, read
from asrkit.workbench.schemas import share_manifest, validator

Record = Mapping[str, Any]


def add(paths: Iterable[str | Path], into: Path, *, dirty: bool = False) -> list[Record]:
    """Append the records in `paths` to those in `into`; returns those that are new there.

    They go to `into/<machine id>/bench.jsonl`. An addition that was killed is finished when it is
    run again.

    Args:
        paths: Files of records, and folders that `asrkit bench all --minutes` wrote.
        into: Folder with one folder a machine, created when missing.
        dirty: Also take records of code that no commit of this checkout holds.

    Raises:
        ValueError: A folder holds a rehearsal, a file is not as its manifest says, a record is torn
            or was changed, or (without `dirty`) no commit here holds the code that measured.
            Nothing is taken.
        OSError: The disk is full. Nothing is taken.
    """
    expect_validator()
    offered = {
        record["content_sha256"]: record for path in paths for record in _delivered(Path(path))
    }
    if not dirty:
        _expect_committed_code(_unknown(offered, into))
    with lock(into, wait=True):
        for leftover in into.glob("*/.bench-????????.jsonl"):
            leftover.unlink()  # of an addition that was killed
        new = _unknown(offered, into)
        _append_by_machine(new, into)
    return new


def _unknown(offered: Mapping[str, Record], into: Path) -> list[Record]:
    """The offered records, keyed by hash, that `into` does not hold yet."""
    known = set()
    if into.exists():
        known = {record["content_sha256"] for record in read(into)}
    return [record for digest, record in offered.items() if digest not in known]


def _expect_committed_code(records: Sequence[Record]) -> None:
    """Raise ValueError for a record of code that no commit of this checkout holds."""
    has_this_commit = functools.cache(has_commit)
    commit_of_source = functools.cache(commit_of)
    for record in records:
        code = record["code"]
        if code["commit"]:
            is_here = has_this_commit(code["commit"])
        else:
            is_here = commit_of_source(code.get("source", "")) is not None
        if is_here and not code["dirty"]:
            continue
        measured_by = "other code"
        if code["dirty"]:
            measured_by = "a checkout with uncommitted changes"
        raise ValueError(
            f"{record['what']} of {record['captured_at']}: expected records of code that a commit "
            f"here holds, got {measured_by}. Pass --dirty to take it."
        )


def _append_by_machine(records: Iterable[Record], into: Path) -> None:
    """Write every machine's file beside the old one, then replace all of them."""
    by_machine = defaultdict[str, list[Record]](list)
    for record in records:
        by_machine[record["machine"]["id"]].append(record)
    with contextlib.ExitStack() as replacements:
        for machine_id in sorted(by_machine):
            target = into / machine_id / "bench.jsonl"
            before = b""
            if target.exists():
                before = target.read_bytes()
            if before and not before.endswith(b"\n"):
                before += b"\n"
            part = replacements.enter_context(atomic(target))
            part.write_bytes(before + json_lines(by_machine[machine_id]))


def _delivered(path: Path) -> list[Record]:
    """Records of a file, or of a folder with a manifest.

    Raises:
        ValueError: Something is not as it was written; the message names it.
    """
    expect(
        path.exists(),
        "paths",
        "files of records, or folders that `bench all --minutes` wrote",
        repr(str(path)),
        "There is no such file.",
    )
    if path.is_dir():
        _expect_as_manifest_says(path)
        path = path / "bench.jsonl"
    lines = [*checked_lines(path)]
    problems = [reason for _, reason in lines if reason]
    if problems:
        raise ValueError(f"{'; '.join(problems[:3])}. Nothing was taken.")
    return [record for record, _ in lines]


def _expect_as_manifest_says(folder: Path) -> None:
    manifest = _manifest(folder)
    if manifest["state"] != "ended":
        raise ValueError(
            f"{folder}: expected a run that has ended. Run its command again to go on, "
            f"or add {folder / 'bench.jsonl'}."
        )
    if manifest["quick"]:
        raise ValueError(
            f"{folder}: expected a run of whole sizes, got a rehearsal: --quick, or on a CPU. "
            "Nothing was taken."
        )
    for name in FILES:
        listed = manifest["files"][name]
        path = folder / name
        data = b""
        if path.exists():
            data = path.read_bytes()
        if content_hash(data) != listed["sha256"]:
            raise ValueError(
                f"{path}: expected what the manifest says, {listed['bytes']} bytes, "
                "got others. Nothing was taken."
            )


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.exists():
        raise ValueError(
            f"{folder}: expected a folder that `asrkit bench all --minutes` wrote, "
            "got one without manifest.json."
        )
    manifest: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        manifest = json.loads(path.read_text("utf-8"))
    mismatch = validator(share_manifest(FILES))(manifest)
    if mismatch is not None:
        other = mismatch.place or "text"
        raise ValueError(f"{path}: expected what `bench all --minutes` wrote, got another {other}.")
    return manifest
