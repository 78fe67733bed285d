"""How one notebook fared: read from its executed copy, written beside it, and kept by a resume."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import nbformat
from papermill.exceptions import PapermillExecutionError

from asrkit.files import atomic, content_hash
from asrkit.workbench.machine import code
from asrkit.workbench.records import MIME, problem
from asrkit.workbench.report.jobs import Job

SLOWEST_CELLS = 3
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """How one notebook fared.

    `slowest` are (cell id, seconds); `records` are the sound ones in its outputs; `defects` say
    what is wrong with the others. `sha256` is of the executed copy, `source` of the notebook as it
    was read. `cell` is the one that failed. `commit` is the code's, with a + where it was changed.
    """

    name: str
    status: Literal["ran", "failed"]
    seconds: float
    parameters: Mapping[str, Any]
    sha256: str
    error: str = ""
    cell: str = ""
    slowest: Sequence[Sequence[Any]] = ()
    records: Sequence[dict[str, Any]] = field(default=(), repr=False)
    defects: Sequence[str] = ()
    source: str = ""
    device: str = "auto"
    commit: str = ""

    def line(self) -> str:
        """The outcome in one line; for a failure the last line of the traceback and the cell."""
        if self.status == "ran":
            return f"{self.name}: ran in {self.seconds:.0f} s, {count_of_records(self.records)}"
        reason = (self.error.strip().splitlines() or ["failed"])[-1]
        if self.cell:
            reason += f" (cell {self.cell})"
        return f"{self.name}: {reason}"


def count_of_records(records: Sequence[Any]) -> str:
    """How many records there are, in words: "1 record", "2 records"."""
    if len(records) == 1:
        return "1 record"
    return f"{len(records)} records"


def kept_run(out: Path, name: str, job: Job) -> NotebookRun | None:
    """The result of an earlier run of the same work, if it is there completely.

    Args:
        out: Folder of executed notebooks.
        name: Name of the notebook.
        job: What would run now; another source, device or parameter makes it other work.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        run = NotebookRun(**json.loads((out / f"{name}.json").read_text("utf-8")))
        executed = (out / f"{name}.ipynb").read_bytes()
        parameters = json.loads(json.dumps(job.parameters, default=str))  # as they were written
        is_same_work = (
            run.source == job.source
            and run.device == job.device
            and run.parameters == parameters
            and run.sha256 == _sha256(executed)
        )
        if is_same_work and run.status == "ran":
            return run
    return None


def finish(
    out: Path, name: str, job: Job, part: Path, failure: BaseException | None
) -> NotebookRun:
    """Move an executed copy into place, and write its result beside it.

    Args:
        out: Folder of executed notebooks.
        name: Name of the notebook.
        job: What ran.
        part: The executed copy, which may be there even when the run failed.
        failure: What the run raised, or None.
    """
    for old in (out / f"{name}.json", out / f"{name}.ipynb"):
        old.unlink(missing_ok=True)
    commit = code()["commit"] or ""
    if code()["dirty"]:
        commit += "+"
    run = NotebookRun(
        name=name,
        **outcome(part, failure),
        parameters=job.parameters,
        source=job.source,
        device=job.device,
        commit=commit,
    )
    if part.is_file():
        os.replace(part, out / f"{name}.ipynb")
    with atomic(out / f"{name}.json") as temporary:
        temporary.write_text(json.dumps(asdict(run), default=str), "utf-8")
    return run


def outcome(executed: Path, failure: BaseException | None) -> dict[str, Any]:
    """The fields of a NotebookRun that an executed copy tells.

    Args:
        executed: The copy; where there is none, the failure is all that is known.
        failure: What the run raised, or None.
    """
    if not executed.is_file():
        return {"status": "failed", "seconds": 0.0, "sha256": "", "error": _first_line(failure)}
    notebook = nbformat.read(executed, 4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    records, defects = _published_records(outputs)
    timed = [(cell.id, _papermill(cell).get("duration") or 0.0) for cell in notebook.cells]
    timed.sort(key=lambda cell_and_seconds: -cell_and_seconds[1])
    return {
        "status": "failed" if failure else "ran",
        "seconds": _papermill(notebook).get("duration") or 0.0,
        "sha256": _sha256(executed.read_bytes()),
        "error": _error(outputs, failure),
        "slowest": timed[:SLOWEST_CELLS],
        "records": records,
        "defects": defects,
        "cell": _failed_cell(notebook) if failure else "",
    }


def _sha256(data: bytes) -> str:
    return content_hash(data).removeprefix("sha256:")


def _papermill(part: Any) -> Mapping[str, Any]:
    """What papermill noted of a notebook or a cell."""
    return part.metadata.get("papermill", {})


def _failed_cell(notebook: Any) -> str:
    """Id of the code cell that ended a notebook; empty where none had begun."""
    last = ""
    for cell in notebook.cells:
        status = _papermill(cell).get("status", "pending")
        if cell.cell_type != "code" or status == "pending":
            continue
        last = cell.id
        if status in ("failed", "running"):
            break
    return last  # papermill calls a cell completed that timed out or lost its kernel


def _published_records(outputs: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Records among outputs, and what is wrong with those that are left out."""
    records, defects = [], []
    for output in outputs:
        record = output.get("data", {}).get(MIME)
        if not record:
            continue
        reason = problem(record)
        if reason:
            defects.append(f"left out a record, {reason}")
        else:
            records.append(record)
    return records, defects


def _first_line(failure: BaseException | None) -> str:
    """What ended a notebook from outside: a timeout goes on with the cell, between rules."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def _error(outputs: Sequence[Any], failure: BaseException | None) -> str:
    """The last traceback of a notebook without colours, and what ended it from outside."""
    errors = [
        "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
        for output in outputs
        if output.output_type == "error"
    ]
    text = "".join(errors[-1:])
    if failure and not isinstance(failure, PapermillExecutionError):  # a timeout, a dead kernel
        text = f"{text}\n{type(failure).__name__}: {_first_line(failure)}".strip()
    return ANSI_COLOUR.sub("", text)
