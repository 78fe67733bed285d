"""Records: one measurement each, as one line of JSON.

A record holds what was measured, the machine, the software and the commit. Host names, user names
and paths are left out. Git has the history of committed records.
"""

import datetime
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.files import plain_json
from asrkit.shapes import expect
from asrkit.workbench.machine import code, load_average, software, this_machine

MIME = "application/vnd.asrkit.record+json"
Record = Mapping[str, Any]
SCHEMA = "asrkit.record/2"
FIRST_SCHEMA = "asrkit.record/1"
# params that are conditions: two records are compared only if all of these agree
CONDITIONS = tuple("phase dtype device threads shape B T U U1 V D ranks day".split())


def _now() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%FT%TZ}"


@dataclass(frozen=True)
class Measurement:
    """`value` of `metric` in `unit` for the claim or benchmark `what`.

    `samples` are the repeats, in the same unit. Both arms of a ratio come from one run: a sample is
    the ratio within one repeat, and params["arms"] is [numerator, denominator].

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
    load1: float | None = field(default_factory=load_average)  # pass the load before the run
    captured_at: str = field(default_factory=_now)

    def __post_init__(self) -> None:
        numbers = plain_json([self.value, *self.samples])
        are_numbers = all(isinstance(number, int | float) for number in numbers)
        expect(are_numbers, self.what, "numbers as value and samples", numbers)
        plain_json(self.params)

    def record(self) -> dict[str, Any]:
        """The record: fields, quartiles, UTC time, machine, software and code, as plain JSON."""
        samples = plain_json([*self.samples] or [self.value])
        p25, p50, p75 = np.percentile(samples, (25, 50, 75))
        stats = {"n": len(samples), "warmup": self.warmup, "min": min(samples)}
        record = {
            **asdict(self),
            "schema": SCHEMA,
            "stats": stats | {"p25": p25, "p50": p50, "p75": p75},
            "machine": this_machine(),
            "software": software(),
            "code": code(),
        }
        return plain_json(record)


TYPES = {
    **dict.fromkeys(("what", "metric", "unit", "impl", "timer", "origin", "captured_at"), str),
    **dict.fromkeys(("params", "stats", "machine", "software", "code"), dict),
    "samples": list,
}
REQUIRED_KEYS = {
    "stats": ("n", "p25", "p50", "p75"),
    "machine": ("id", "gpus", "cpu_model"),
    "code": ("commit",),
}


def publish(record: Measurement | dict[str, Any]) -> None:
    """Show `record` as one line of a notebook's output, where the report collects it."""
    from IPython.display import display

    row = _row(record)
    unit = "" if row["unit"] == "1" else row["unit"]
    line = "{what}: {metric} {value:.4g} {unit} {impl}".format(**{**row, "unit": unit})
    display({MIME: row, "text/plain": " ".join(line.split())}, raw=True)


def _row(record: Measurement | dict[str, Any]) -> dict[str, Any]:
    if isinstance(record, Measurement):
        return record.record()
    return record


def code_version(record: Record) -> str:
    """The code that took a record: "commit 1a2b3c4", or "commit 1a2b3c4 with changes"."""
    code = record["code"]
    changes = " with changes" if code["dirty"] else ""
    return f"commit {(code['commit'] or 'unknown')[:7]}{changes}"


def problem(record: Any) -> str:
    """Why `record` is not a record; empty if it is one."""
    if not isinstance(record, dict):
        return "not a record"
    for name, kind in TYPES.items():
        if not isinstance(record.get(name), kind):
            return f"not a record: {name!r} is not a {kind.__name__}"
    for name, keys in REQUIRED_KEYS.items():
        for key in keys:
            if key not in record[name]:
                return f"not a record: {name!r} has no {key!r}"
    stats = [record["stats"][key] for key in REQUIRED_KEYS["stats"]]
    for number in [record.get("value"), *record["samples"], *stats]:
        if not isinstance(number, int | float) or not abs(number) <= sys.float_info.max:
            return f"not a record: {number!r} is not a finite number"
    if record.get("schema") not in (FIRST_SCHEMA, SCHEMA):
        return f"not a record: 'schema' is {record.get('schema')!r}"
    return ""


def append(path: str | Path, *records: Measurement | dict[str, Any]) -> None:
    """Add records to a JSON-lines file in one write of whole lines.

    Several processes may append at the same time.

    Raises:
        OSError: The disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(_row(record)) + "\n" for record in records).encode()
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash cut the last line, which ends here
                data = b"\n" + data
        file.write(data)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records in a file, or in every *.jsonl file below a folder, with current names.

    Hidden files in a folder are skipped: they may be left over from a killed process. Incomplete
    lines and lines that are not records are skipped too, with a warning each.
    """
    files = [Path(path)]
    if files[0].is_dir():
        files = sorted(files[0].rglob("[!.]*.jsonl"))
    records = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if not line:  # two processes that append at the same time may write an empty line
                continue
            try:
                record = json.loads(line)
                reason = problem(record)
            except (ValueError, RecursionError):
                reason = "incomplete JSON"
            if reason:
                warnings.warn(f"left out {file}:{number}: {reason}", stacklevel=2)
            else:
                records.append(_with_current_names(record))
    return records


def newest_run(
    records: Iterable[dict[str, Any]], what: str, *, metric: str = "latency", **params: Any
) -> dict[str, dict[str, Any]]:
    """The records of the last run that measured a case, by implementation.

    Args:
        records: Records to search.
        what: The claim or benchmark.
        metric: The measured quantity.
        **params: Values that a record's `params` must have, for example device="cuda".

    Raises:
        ValueError: No record matches.
    """
    matching = [
        record
        for record in records
        if record["what"] == what
        and record["metric"] == metric
        and params.items() <= record["params"].items()
    ]
    expect(bool(matching), "records", f"a record of {what} with {params}", "none")
    last = max(matching, key=lambda record: record["captured_at"])
    return {record["impl"]: record for record in matching if _run(record) == _run(last)}


def _run(record: Record) -> tuple[str, str]:
    return record["machine"]["id"], code_version(record)


def device(record: Record) -> str:
    """The GPUs of a record's machine by name, or its CPU if it has none."""
    gpus = " + ".join(gpu["name"] for gpu in record["machine"]["gpus"])
    return gpus or record["machine"]["cpu_model"]


def measured_on(record: Record) -> str:
    """The machine and the code of a record: "NVIDIA H100 80GB HBM3, commit 1a2b3c4"."""
    return f"{device(record)}, {code_version(record)}"


RENAMED = {"label_looping": "windowed_looping", "nested_loops": "label_looping"}
OLD_NAME = re.compile(r"(?<![a-z0-9_])((?:only_|to_)?)(label_looping|nested_loops)")


def _with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with the current names of the decoding strategies.

    In records of schema 1, `label_looping` is our windowed variant and `nested_loops` the published
    algorithm; the current names are `windowed_looping` and `label_looping`. Files keep the old
    names, which are replaced when they are read.
    """
    if record["schema"] != FIRST_SCHEMA:
        return record
    text = json.dumps({"impl": record["impl"], "params": record["params"]})
    return record | json.loads(OLD_NAME.sub(lambda match: match[1] + RENAMED[match[2]], text))
