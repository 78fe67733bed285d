"""Records: one measurement each, one JSON line each, sealed with a hash of its content.

A record says what was measured, on which machine, with which software and from which commit. The
hash shows whether a record was changed later, not whether it is true. No host, user or path is
kept.
"""

import datetime
import json
import os
import re
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asrkit.files import atomic, content_hash, plain_json
from asrkit.workbench.machine import code, load_average, software, this_machine
from asrkit.workbench.schemas import record_validator

MIME = "application/vnd.asrkit.record+json"
SCHEMA = "asrkit.record/2"
FIRST_SCHEMA = "asrkit.record/1"
FILES = ("bench.jsonl", "checks.jsonl", "log.txt")  # of a share; manifest.json has their hashes


@dataclass(frozen=True)
class Measurement:
    """`value` of `metric` in `unit` for the claim or benchmark `what`.

    `samples` are its repeats in the same unit. A ratio takes both arms from one run: a sample is
    the ratio of one repeat, and params["arms"] is [numerator, denominator].

    Raises:
        ValueError: The value or a sample is not a finite number, or `params` are not JSON.
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
    load1: float | None = field(default_factory=load_average)  # better: from before the run

    def __post_init__(self) -> None:
        data = plain_json([*self.samples] or [self.value])
        for number in [plain_json(self.value), *data]:
            if not isinstance(number, int | float):
                raise ValueError(
                    f"{self.what}: expected numbers, got value {self.value!r}, samples {data}."
                )
        record = plain_json(
            {
                "schema": SCHEMA,
                **asdict(self),
                "captured_at": f"{datetime.datetime.now(datetime.UTC):%FT%TZ}",
                "stats": _statistics(data, self.warmup),
                "machine": this_machine(),
                "software": software(),
                "code": code(),
            }
        )
        record["content_sha256"] = content_hash(record)
        object.__setattr__(self, "_record", record)

    def sealed(self) -> dict[str, Any]:
        """A copy of the record, made at birth.

        It holds the fields, quartiles, UTC time, machine, software, code and a hash of it all.
        """
        return plain_json(self.__dict__["_record"])


def _statistics(samples: Sequence[float], warmup: int) -> dict[str, float]:
    at_least_two = [*samples] if len(samples) > 1 else [*samples] * 2
    p25, p50, p75 = statistics.quantiles(at_least_two, method="inclusive")
    return {
        "n": len(samples),
        "warmup": warmup,
        "min": min(samples),
        "p25": p25,
        "p50": p50,
        "p75": p75,
    }


def publish(record: Measurement | dict[str, Any]) -> None:
    """Show `record` as one line of a notebook's output, from where the report collects it."""
    from IPython.display import display

    sealed = _sealed(record)
    line = "{what}: {metric} {value:.4g}".format(**sealed)
    if sealed["unit"] != "1":
        line += f" {sealed['unit']}"
    if sealed["impl"]:
        line += f" {sealed['impl']}"
    display({MIME: sealed, "text/plain": line}, raw=True)


def _sealed(record: Measurement | dict[str, Any]) -> dict[str, Any]:
    if isinstance(record, Measurement):
        return record.sealed()
    return record


def code_version(record: Mapping[str, Any]) -> str:
    """The code that measured a record: "commit 1a2b3c4", or "source ..." for a copy without git."""
    code = record["code"]
    if code["commit"]:
        return f"commit {code['commit'][:7]}"
    return f"source {code.get('source') or 'unknown'}"


def problem(record: Any) -> str:
    """Why `record` is not a record, or how it differs from what was sealed; empty if it is sound.

    Its fields are checked where fastjsonschema is installed. A bare GPU machine checks the hash
    only; there, records are its own.
    """
    first_mismatch = record_validator()
    if not isinstance(record, dict):
        return "no record"
    mismatch = first_mismatch(record) if first_mismatch else None
    if mismatch is not None:
        return f"no record: {mismatch.place}"
    body = {key: value for key, value in record.items() if key != "content_sha256"}
    try:
        digest = content_hash(body)
    except ValueError:
        return "no record: a number that is not finite"
    if digest != record.get("content_sha256"):
        return "changed after it was sealed"
    return ""


def append(path: str | Path, *records: Measurement | dict[str, Any]) -> None:
    """Add records to a JSON-lines file; see `extend`.

    Raises:
        ValueError: A record is not as it was sealed; nothing is written then.
    """
    sealed = [_sealed(record) for record in records]
    for record in sealed:
        reason = problem(record)
        if reason:
            raise ValueError(
                f"records: expected records as they were sealed, got one that is {reason}."
            )
    extend(path, *sealed)


def extend(path: str | Path, *rows: Mapping[str, Any]) -> None:
    """Add rows to a JSON-lines file in one write of whole lines.

    Several processes may do so at once.

    Raises:
        OSError: The disk is full.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    data = json_lines(rows)
    with Path(path).open("ab+", buffering=0) as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # torn by a crash: it must not swallow the next line
                data = b"\n" + data
        remaining = memoryview(data)
        while remaining:  # a full disk takes a part, and raises at the next write
            written = file.write(remaining)
            remaining = remaining[written:]
        os.fsync(file.fileno())


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The rows as JSON, one a line."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def files(path: Path) -> list[Path]:
    """`path` itself, or every *.jsonl file below it if it is a folder.

    Hidden files are left out: a process that was killed may have left them half-written.
    """
    if not path.is_dir():
        return [path]
    listed = sorted(path.rglob("*.jsonl"))
    return [file for file in listed if file.is_file() and not file.name.startswith(".")]


def checked_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """(record, problem) for each line of a file or folder; the problem is empty for a sound record.

    A problem names the file and the line. The record is None where the line is not JSON.
    """
    for file in files(path):
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if not line:  # two processes that append at once may leave an empty line
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                yield None, f"{file}:{number}: torn, no whole JSON"
                continue
            reason = problem(record)
            if reason:
                reason = f"{file}:{number}: {reason}"
            yield record, reason


def read(path: str | Path) -> list[dict[str, Any]]:
    """Records of a file, or of every *.jsonl file below a folder, with today's names.

    Lines that are torn or were changed are left out, with a warning each.
    """
    sound = []
    for record, reason in checked_lines(Path(path)):
        if reason:
            warnings.warn(f"left out {reason}", stacklevel=2)
        else:
            sound.append(_named_as_today(record))
    return sound


RENAMED = {"label_looping": "windowed_looping", "nested_loops": "label_looping"}
OLD_NAME = re.compile(r"(?<![a-z0-9_])((?:only|to)_)?(label_looping|nested_loops)")


def with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with decoding strategies called what they are called today.

    In records of schema 1 `label_looping` names our windowed variant and `nested_loops` the
    published algorithm; today they are `windowed_looping` and `label_looping`. The file keeps the
    record as it was sealed, old names, schema and hash included: only what is read is renamed. A
    record that was renamed before no longer has the content of its hash, and is returned as it is.
    """
    if problem(record):
        return record
    return _named_as_today(record)


def _named_as_today(record: dict[str, Any]) -> dict[str, Any]:
    """The same of a record that is sound."""
    if record["schema"] != FIRST_SCHEMA:
        return record
    return record | {"impl": _renamed(record["impl"]), "params": _renamed(record["params"])}


def _renamed(value: Any) -> Any:
    """`value` with the old names of strategies replaced in every text that it holds."""
    if isinstance(value, str):
        return OLD_NAME.sub(_current_name, value)
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if isinstance(value, dict):
        return {_renamed(key): _renamed(item) for key, item in value.items()}
    return value


def _current_name(match: re.Match[str]) -> str:
    return (match[1] or "") + RENAMED[match[2]]


def verify(paths: Iterable[str | Path]) -> list[str]:
    """One line for each record in `paths` (files or folders) that is torn or was changed.

    Raises:
        ValueError: fastjsonschema is not installed, so that fields cannot be checked.
    """
    expect_validator()
    return [reason for path in paths for _, reason in checked_lines(Path(path)) if reason]


def expect_validator() -> None:
    """Raise ValueError where records cannot be checked against their schema."""
    if record_validator() is None:
        raise ValueError(
            "records: expected the package fastjsonschema, which checks their fields, got none. "
            "Run pip install fastjsonschema."
        )


def mend(path: Path) -> list[str]:
    """Remove from a file the lines that are torn or were changed; returns a line about each.

    Nobody else may write to the file at the same time.
    """
    lines = [*checked_lines(path)]
    problems = [reason for _, reason in lines if reason]
    if problems:
        with atomic(path) as part:
            part.write_bytes(json_lines(record for record, reason in lines if not reason))
    return problems
