"""One observation, one JSON line: what was measured, on which machine, with which software, from
which commit.

A record ends in a hash of its content: it shows that a record changed, not that it is true. No
host, user or path is kept.
"""

import contextlib
import datetime
import functools
import json
import os
import re
import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asrkit.files import _plain, alone, atomic, content_hash
from asrkit.workbench.machine import _held, code, commit_of, software, this_machine

MIME = "application/vnd.asrkit.record+json"
SCHEMA = "asrkit.record/2"
FIRST_SCHEMA = "asrkit.record/1"
FILES = ("bench.jsonl", "checks.jsonl", "log.txt")  # of a share; manifest.json has their hashes

# What must stand in a file: a type, a pattern, alternatives (... is missing), a list or a dict of
# such; more keys may stand there.
LINE, HASH = re.compile(r"[^\x00-\x1f\x7f-\x9f]*"), re.compile("sha256:[0-9a-f]{64}")
WANTED = {
    "schema": re.compile(r"asrkit\.record/[12]"),
    "captured_at": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
    **dict.fromkeys(("what", "metric", "unit", "impl", "timer", "origin"), LINE),
    "value": float,
    "samples": [float],
    "warmup": int,
    "load1": float,
    "params": {"arms": ([LINE], ...)},
    "stats": {"n": int, "warmup": int, "min": float, "p25": float, "p50": float, "p75": float},
    "machine": {
        "id": re.compile("[0-9a-f]{12}"),
        **dict.fromkeys(("system", "cpu_model", "kernel"), LINE),
        "isa": [LINE],
        "cpu_usable": int,
        "ram_gib": int,
        "gpus": [dict.fromkeys(("name", "memory.total", "driver_version"), LINE)],
    },
    "software": {"torch": (LINE, None)},
    "code": {
        "commit": (re.compile("[0-9a-f]{40,64}"), None),
        "dirty": (bool, None),
        "argv": [str],
        "source": (LINE, ...),
    },
}
DELIVERED = {
    "schema": re.compile("asrkit.share/1"),
    "state": LINE,
    "quick": bool,
    "files": {name: {"bytes": int, "sha256": HASH} for name in FILES},
}


@dataclass(frozen=True)
class Measurement:
    """`value` of `metric` in `unit` for claim or benchmark `what`; `samples` are its repeats, in
    the same unit.

    A ratio takes both arms from one run: a sample is one repeat's ratio, params["arms"] =
    [numerator, denominator].
    """

    what: str
    metric: str
    unit: str
    value: float
    samples: tuple[float, ...] = ()
    warmup: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    impl: str = ""
    timer: str = ""
    origin: str = "measured"
    load1: float = field(
        default_factory=lambda: os.getloadavg()[0]
    )  # pass the load from before the run if you have it

    def __post_init__(self) -> None:
        data = _plain([*self.samples] or [self.value])
        if not all(isinstance(number, int | float) for number in [_plain(self.value), *data]):
            raise ValueError(
                f"{self.what}: expected numbers, got value {self.value!r}, samples {data}."
            )
        p25, p50, p75 = statistics.quantiles(
            data if len(data) > 1 else data * 2, method="inclusive"
        )
        record = {
            "schema": SCHEMA,
            **asdict(self),
            "captured_at": f"{datetime.datetime.now(datetime.UTC):%FT%TZ}",
        }
        record |= {
            "stats": {
                "n": len(data),
                "warmup": self.warmup,
                "min": min(data),
                "p25": p25,
                "p50": p50,
                "p75": p75,
            }
        }
        record = _plain(
            record | {"machine": this_machine(), "software": software(), "code": code()}
        )
        self.__dict__["record"] = record | {"content_sha256": content_hash(record)}

    def sealed(self) -> dict[str, Any]:
        """The record, made at birth: these fields, quartiles, UTC time, machine, software, code and
        the hash of it all.
        """
        return _plain(self.__dict__["record"])


def publish(record: Measurement | dict[str, Any]) -> None:
    """Show `record` as one line of a notebook's output; the report takes the whole record from
    there.
    """
    from IPython.display import display

    sealed = record.sealed() if isinstance(record, Measurement) else record
    unit = "" if sealed["unit"] == "1" else f" {sealed['unit']}"
    line = "{what}: {metric} {value:.4g}".format(**sealed) + f"{unit} {sealed['impl']}"
    display({MIME: sealed, "text/plain": line.rstrip()}, raw=True)


def written(record: Mapping[str, Any]) -> str:
    """The code that measured a record in a few letters: its commit, or of a copy without git the
    hash of its files.
    """
    code = record["code"]
    return (
        f"commit {code['commit'][:7]}"
        if code["commit"]
        else f"source {code.get('source') or 'unknown'}"
    )


def _misfit(value: Any, wanted: Any) -> str | None:
    """Where `value` is not as `wanted`, as in ".stats.n"; None if nowhere. Numbers are finite, and
    True is none.
    """
    if isinstance(wanted, tuple):
        return None if any(_misfit(value, one) is None for one in wanted) else ""
    if isinstance(wanted, list) and isinstance(value, list):
        wanted, value = dict.fromkeys(range(len(value)), wanted[0]), dict(enumerate(value))
    if isinstance(wanted, dict) and isinstance(value, dict):
        inside = ((key, _misfit(value.get(key, ...), one)) for key, one in wanted.items())
        return next((f".{key}{at}" for key, at in inside if at is not None), None)
    if isinstance(wanted, re.Pattern):
        fits = isinstance(value, str) and wanted.fullmatch(value) is not None
    elif wanted is float:
        fits = type(value) in (int, float) and abs(value) <= sys.float_info.max
    else:
        fits = value is wanted or type(value) is wanted
    return None if fits else ""


def problem(record: Any) -> str:
    """Why `record` is none, or is not as it was sealed; empty when it is."""
    if (where := _misfit(record, WANTED)) is not None:
        return f"no record: {where[1:]}".rstrip(": ")
    body = {key: item for key, item in record.items() if key != "content_sha256"}
    try:
        return (
            ""
            if content_hash(body) == record.get("content_sha256")
            else "changed after it was sealed"
        )
    except ValueError:
        return "no record: a number that is not finite"


def append(path: str | Path, *records: Measurement | dict[str, Any]) -> None:
    """Add `records` to a JSON-lines file in one write of whole lines, safe beside other processes
    that append too.
    """
    sealed = [record.sealed() if isinstance(record, Measurement) else record for record in records]
    if wrong := [why for record in sealed if (why := problem(record))]:
        raise ValueError(
            f"records: expected records as they were sealed, got one that is {wrong[0]}."
        )
    extend(path, *sealed)


def extend(path: str | Path, *rows: Mapping[str, Any]) -> None:
    """Add `rows` to a JSON-lines file in one write of whole lines, safe beside others that do;
    OSError where the disk is full.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab+", buffering=0) as file:
        torn = file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        left = memoryview(
            b"\n" * bool(torn) + _text(rows)
        )  # a line torn by a crash must not swallow the next
        while left:  # a disk that is full takes a part, and raises at the next
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def _text(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def files(path: Path) -> list[Path]:
    """`path`, or every *.jsonl under it if it is a folder; what a killed process left half-written
    is none of them.
    """
    found = (
        file
        for file in sorted(path.rglob("*.jsonl"))
        if file.is_file() and not file.name.startswith(".")
    )
    return [*found] if path.is_dir() else [path]


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    for file in files(path):
        for number, line in (
            (n, text) for n, text in enumerate(file.read_bytes().splitlines(), 1) if text
        ):
            try:  # an empty line is what two that append at once may leave
                record = json.loads(line)
                yield record, (why := problem(record)) and f"{file}:{number}: {why}"
            except (ValueError, RecursionError):
                yield None, f"{file}:{number}: torn, no whole JSON"


def read(path: str | Path) -> list[dict[str, Any]]:
    """Records of a file, or of every *.jsonl under a folder; leaves out, with a warning, what is
    torn or changed.
    """
    lines = list(_lines(Path(path)))
    for wrong in filter(None, (wrong for _, wrong in lines)):
        warnings.warn(f"left out {wrong}", stacklevel=2)
    return [with_current_names(record) for record, wrong in lines if not wrong]


RENAMED = {"label_looping": "windowed_looping", "nested_loops": "label_looping"}
OLD_NAME = re.compile(r"(?<![a-z0-9_])((?:only|to)_)?(label_looping|nested_loops)")


def with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with decoding strategies called what they are called today.

    In records of schema 1 `label_looping` names our windowed variant and `nested_loops` the
    published algorithm; today they are `windowed_looping` and `label_looping`. The file keeps the
    record as it was sealed, old names, schema and hash included: only what is read is renamed.
    """
    if record["schema"] != FIRST_SCHEMA:
        return record
    return record | {"impl": _renamed(record["impl"]), "params": _renamed(record["params"])}


def _renamed(value: Any) -> Any:
    """`value` with the old names of strategies replaced in every text that it holds."""
    if isinstance(value, str):
        return OLD_NAME.sub(lambda match: (match[1] or "") + RENAMED[match[2]], value)
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if isinstance(value, dict):
        return {_renamed(key): _renamed(item) for key, item in value.items()}
    return value


def verify(paths: Iterable[str | Path]) -> list[str]:
    """One line for each record in `paths` (files or folders) that is torn, or whose recomputed hash
    says it changed.
    """
    return [wrong for path in paths for _, wrong in _lines(Path(path)) if wrong]


def mend(path: Path) -> list[str]:
    """Leaves out of a file what is torn or was changed, if nobody else writes to it, and says which
    lines those were.
    """
    lines = [*_lines(path)]
    if wrong := [why for _, why in lines if why]:
        with atomic(path) as part:
            part.write_bytes(_text(record for record, why in lines if not why))
    return wrong


def add(paths: Iterable[str | Path], into: Path, *, dirty: bool = False) -> list[dict[str, Any]]:
    """Takes records in, from folders that `asrkit bench all --minutes` wrote and from files, and
    returns those that are new.

    They are appended to into/<machine id>/bench.jsonl. ValueError, and nothing is taken, where a
    folder is of a rehearsal, a file is not as its manifest says, a record is torn or was changed,
    or no commit of this checkout holds the code that measured; `dirty` lets the last pass. OSError,
    and nothing is taken, where the disk is full. Killed, it goes on when run again.
    """
    given = {
        record["content_sha256"]: record for path in paths for record in _delivered(Path(path))
    }

    def new() -> list[dict[str, Any]]:
        known = {record["content_sha256"] for record in read(into)} if into.exists() else set()
        return [record for key, record in given.items() if key not in known]

    clean, held = functools.cache(commit_of), functools.cache(_held)
    for record in [] if dirty else new():
        code, name = record["code"], f"{record['what']} of {record['captured_at']}"
        if code["dirty"] or not (
            held(code["commit"]) if code["commit"] else clean(code.get("source", ""))
        ):
            got = "a checkout with changes" if code["dirty"] else "other code"
            raise ValueError(
                f"{name}: expected records of code that a commit here holds, got {got}. Pass --dirty to take it."
            )
    with (
        alone(into, wait=True),
        contextlib.ExitStack() as parts,
    ):  # renamed together, when all are written
        for left in into.glob("*/.bench-????????.jsonl"):
            left.unlink()  # of an addition that was killed
        taken = new()
        for name in sorted({record["machine"]["id"] for record in taken}):
            target, several = (
                into / name / "bench.jsonl",
                [one for one in taken if one["machine"]["id"] == name],
            )
            before = target.read_bytes() if target.exists() else b""
            part = parts.enter_context(atomic(target))
            part.write_bytes(before + b"\n" * (before[-1:] not in (b"", b"\n")) + _text(several))
    return taken


def _delivered(path: Path) -> list[dict[str, Any]]:
    """Records of a file, or of a folder with a manifest; ValueError names what is not as it was
    written.
    """
    if path.is_dir():
        file = path / "manifest.json"
        if not file.exists():
            raise ValueError(
                f"{path}: expected a folder that `asrkit bench all --minutes` wrote, got one without manifest.json."
            )
        manifest: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            manifest = json.loads(file.read_text("utf-8"))
        if (where := _misfit(manifest, DELIVERED)) is not None:
            raise ValueError(
                f"{file}: expected what `bench all --minutes` wrote, got another {where[1:] or 'text'}."
            )
        if manifest["state"] != "ended":
            raise ValueError(
                f"{path}: expected a run that has ended. Run its command again to go on, or add {path / 'bench.jsonl'}."
            )
        if manifest["quick"]:
            raise ValueError(
                f"{path}: expected a run of whole sizes, got a rehearsal: --quick, or on a CPU. Nothing was taken."
            )
        for name, told in ((name, manifest["files"][name]) for name in FILES):
            data = (path / name).read_bytes() if (path / name).exists() else b""
            if content_hash(data) != told["sha256"]:
                raise ValueError(
                    f"{path / name}: expected what the manifest says, {told['bytes']} bytes, got others. Nothing was taken."
                )
        path = path / "bench.jsonl"
    lines = list(_lines(path))
    if wrong := [why for _, why in lines if why]:
        raise ValueError(f"{'; '.join(wrong[:3])}. Nothing was taken.")
    return [record for record, _ in lines]
