"""Records: one measurement each, one JSON line each.

A record says what was measured, on which machine, with which software and from which commit. No
host, user or path is kept. Git holds the history of those that are committed.
"""

import datetime
import json
import math
import os
import re
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from asrkit.files import plain_json
from asrkit.shapes import expect
from asrkit.workbench.machine import code, load_average, software, this_machine

MIME = "application/vnd.asrkit.record+json"
SCHEMA = "asrkit.record/2"
FIRST_SCHEMA = "asrkit.record/1"


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
        origin = {
            "schema": SCHEMA,
            "captured_at": f"{datetime.datetime.now(datetime.UTC):%FT%TZ}",
            "stats": _statistics(data, self.warmup),
            "machine": this_machine(),
            "software": software(),
            "code": code(),
        }
        object.__setattr__(self, "_record", plain_json({**asdict(self), **origin}))

    def record(self) -> dict[str, Any]:
        """A copy of the record made at birth: fields, quartiles, UTC time, machine, code."""
        return plain_json(self.__dict__["_record"])


FIELDS = (
    *(one.name for one in fields(Measurement)),
    *("schema", "captured_at", "stats", "machine", "software", "code"),
)


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

    row = _row(record)
    line = "{what}: {metric} {value:.4g}".format(**row)
    if row["unit"] != "1":
        line += f" {row['unit']}"
    if row["impl"]:
        line += f" {row['impl']}"
    display({MIME: row, "text/plain": line}, raw=True)


def _row(record: Measurement | dict[str, Any]) -> dict[str, Any]:
    if isinstance(record, Measurement):
        return record.record()
    return record


def code_version(record: Mapping[str, Any]) -> str:
    """The code that measured a record: "commit 1a2b3c4"."""
    return f"commit {(record['code']['commit'] or 'unknown')[:7]}"


def problem(record: Any) -> str:
    """Why `record` is not a record; empty if it is one."""
    if not isinstance(record, dict):
        return "no record"
    missing = [name for name in FIELDS if name not in record]
    if missing:
        return f"no record: missing field {missing[0]}"
    for number in [record["value"], *record["samples"]]:
        if not isinstance(number, int | float) or not math.isfinite(number):
            return f"no record: value {number!r} is no finite number"
    if record["schema"] not in (FIRST_SCHEMA, SCHEMA):
        return f"no record: schema {record['schema']!r}"
    return ""


def append(path: str | Path, *records: Measurement | dict[str, Any]) -> None:
    """Add records to a JSON-lines file in one write of whole lines.

    Several processes may do so at once.

    Raises:
        OSError: The disk is full.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(_row(record)) + "\n" for record in records).encode()
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


def files(path: Path) -> list[Path]:
    """`path` itself, or every *.jsonl file below it if it is a folder.

    Hidden files are left out: a process that was killed may have left them half-written.
    """
    if not path.is_dir():
        return [path]
    listed = sorted(path.rglob("*.jsonl"))
    return [file for file in listed if file.is_file() and not file.name.startswith(".")]


def read(path: str | Path) -> list[dict[str, Any]]:
    """Records of a file, or of every *.jsonl file below a folder, with today's names.

    Lines that are torn or no records are left out, with a warning each.
    """
    found = []
    for file in files(Path(path)):
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if not line:  # two processes that append at once may leave an empty line
                continue
            try:
                record = json.loads(line)
                reason = problem(record)
            except (ValueError, RecursionError):
                reason = "torn, no whole JSON"
            if reason:
                warnings.warn(f"left out {file}:{number}: {reason}", stacklevel=2)
            else:
                found.append(_with_current_names(record))
    return found


def newest_run(
    found: Iterable[dict[str, Any]], what: str, *, metric: str = "latency", **params: Any
) -> dict[str, dict[str, Any]]:
    """The records of the last run that measured a case, by implementation.

    Args:
        found: Records to look among.
        what: The claim or benchmark.
        metric: What of it was measured.
        **params: What the records' `params` hold, for example device="cuda".

    Raises:
        ValueError: No record fits.
    """
    fitting = [
        record
        for record in found
        if record["what"] == what
        and record["metric"] == metric
        and params.items() <= record["params"].items()
    ]
    expect(bool(fitting), "found", f"a record of {what} with {params}", "none")
    last = max(fitting, key=lambda record: record["captured_at"])
    return {record["impl"]: record for record in fitting if _run(record) == _run(last)}


def _run(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["machine"]["id"], code_version(record)


def device(record: Mapping[str, Any]) -> str:
    """Names of the GPUs of a record's machine, or of its CPU."""
    gpus = " + ".join(gpu["name"] for gpu in record["machine"]["gpus"])
    return gpus or record["machine"]["cpu_model"]


def measured_on(record: Mapping[str, Any]) -> str:
    """The machine and the code of a record: "NVIDIA H100 80GB HBM3, commit 1a2b3c4"."""
    return f"{device(record)}, {code_version(record)}"


RENAMED = {"label_looping": "windowed_looping", "nested_loops": "label_looping"}
OLD_NAME = re.compile(r"(?<![a-z0-9_])((?:only|to)_)?(label_looping|nested_loops)")


def _with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with decoding strategies called what they are called today.

    In records of schema 1 `label_looping` names our windowed variant and `nested_loops` the
    published algorithm; today they are `windowed_looping` and `label_looping`. Files keep the old
    names: only what is read is renamed.
    """
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
