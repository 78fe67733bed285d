"""`asrkit report`: run notebooks and write one folder of pages about them."""

import datetime
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench.report.execute import run_notebooks
from asrkit.workbench.report.frame import write_text
from asrkit.workbench.report.jobs import jobs_of
from asrkit.workbench.report.notebook_run import NotebookRun
from asrkit.workbench.report.plan import DEFAULTS, command_line, read_plan, unfinished
from asrkit.workbench.report.site import build

TIMEOUT_S = {"quick": 600.0, "full": 7200.0}  # of a notebook, by size


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    """Where the report is and how the run went."""

    path: Path
    runs: Sequence[NotebookRun]
    sentence: str
    seconds: float
    defects: Sequence[str]

    @property
    def failed(self) -> list[NotebookRun]:
        """The notebooks that did not run to their end."""
        return [run for run in self.runs if run.status != "ran"]

    @property
    def exit_code(self) -> int:
        """0 if every notebook ran and no page has a defect, else 1."""
        return int(bool(self.failed or self.defects))

    def summary(self) -> str:
        """Failures and defects, one a line, then a sentence on the run."""
        problems = [run.line() for run in self.failed]
        return "\n".join([*problems, *self.defects, self.sentence])

    def facts(self) -> dict[str, Any]:
        """The result for programs: numbers of notebooks, records and defects, seconds, and path."""
        return {
            "notebooks": len(self.runs),
            "ran": len(self.runs) - len(self.failed),
            "records": sum(len(run.records) for run in self.runs),
            "defects": len(self.defects),
            "seconds": round(self.seconds, 1),
            "path": str(self.path),
        }


def report(  # noqa: PLR0913 - one option for each of the command's
    notebooks: Sequence[Path] | None = None,
    out: Path = Path("reports"),
    *,
    parameters: Mapping[str, Any] | None = None,
    size: str | None = None,
    device: str | None = None,
    jobs: int | None = None,
    timeout_s: float | None = None,
    progress: bool = True,
    resume: bool = False,
) -> ReportResult:
    """Run notebooks and write `out/<time>/index.html`, to which `out/latest` then points.

    `latest` moves when all of the folder is written, so a run that is cut short leaves the last
    report in place.

    Args:
        notebooks: Paths of the notebooks; by default notebooks/*.ipynb.
        out: Folder of all reports.
        parameters: Values for the notebooks that declare them; every name must be declared by one.
        size: "quick" or "full", which sets the parameters that a notebook names for that size.
        device: "auto", "cpu" (hides GPUs from the notebooks) or "cuda".
        jobs: Notebooks that run at once; by default half as many as there are cores, or as many as
            cores where all of them measure no time.
        timeout_s: Limit of one notebook in seconds; by default 600, or 7200 at full size.
        progress: Print a line when a notebook starts, and one when it has ended.
        resume: Finish the newest run in `out` if it was cut short or had failures. Other arguments
            win over its plan, and what they change runs again.

    Raises:
        ValueError: An argument cannot be served; nothing has run then.
    """
    start = time.perf_counter()
    out = Path(out)
    folder, plan, paths = _resumed(out, notebooks) if resume else _new(out, notebooks)
    chosen = {"parameters": parameters or None, "size": size, "device": device}
    for name, value in (chosen | {"timeout_s": timeout_s}).items():
        if value is not None:
            plan[name] = value
    _expect_runnable(paths, plan, jobs)  # before a folder is made
    busy = f"resume: expected a run that has ended, got one that is running now, {folder.name}."
    with files.lock(folder, refused=busy):
        plan["notebooks"] = [os.path.relpath(path, folder) for path in paths]
        _begin(folder, plan)
        runs = run_notebooks(
            paths,
            folder / "runs",
            parameters=plan["parameters"],
            size=plan["size"],
            device=plan["device"],
            jobs=jobs,
            timeout_s=plan["timeout_s"] or TIMEOUT_S[plan["size"]],
            progress=progress,
            resume=resume,
        )
        _write_records(folder / "records", runs)
        seconds = time.perf_counter() - start  # one number, on the page and in the summary
        sentence, defects = build(folder, runs, seconds, plan)
    path = _point(out / "latest", folder) / "index.html"
    return ReportResult(path=path, runs=runs, sentence=sentence, seconds=seconds, defects=defects)


def _expect_runnable(paths: Sequence[Path], plan: Mapping[str, Any], jobs: int | None) -> None:
    """Raise ValueError where the plan cannot be run."""
    jobs_of(paths, plan["parameters"], plan["size"], plan["device"])
    limit = plan["timeout_s"]
    expect(limit is None or 0 < limit < math.inf, "timeout_s", "a number of seconds above 0", limit)
    expect(jobs is None or jobs > 0, "jobs", "at least 1", jobs)


def _new(out: Path, notebooks: Sequence[Path] | None) -> tuple[Path, dict[str, Any], list[Path]]:
    """Folder, plan and notebooks of a new run."""
    folder = out / f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}Z-{os.getpid()}"
    paths = sorted(Path("notebooks").glob("*.ipynb")) if notebooks is None else list(notebooks)
    return folder, dict(DEFAULTS), paths


def _resumed(
    out: Path, notebooks: Sequence[Path] | None
) -> tuple[Path, dict[str, Any], list[Path]]:
    """Folder, plan and notebooks of the run to finish."""
    folder = unfinished(out)
    plan = read_plan(folder)
    paths = [Path(os.path.relpath(folder / name)) for name in plan["notebooks"]]
    planned = {path.stem for path in paths}
    named = {path.stem for path in notebooks or paths}
    expect(
        named == planned,
        "notebooks",
        f"none beside --resume, which finishes {folder.name}: {', '.join(sorted(planned))}",
        ", ".join(sorted(named)),
        "Leave them or --resume away.",
    )
    return folder, plan, paths


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    """Add this command to the plan and write it; the run does not count as complete any more."""
    plan["commands"] = [*plan.get("commands", []), command_line(sys.argv)]
    write_text(folder / "plan.json", json.dumps(plan, indent=1, default=str))
    (folder / "manifest.json").unlink(missing_ok=True)


def _write_records(folder: Path, runs: Sequence[NotebookRun]) -> None:
    for run in runs:
        if run.records:
            lines = [json.dumps(record) + "\n" for record in run.records]
            write_text(folder / f"{run.name}.jsonl", "".join(lines))


def _point(latest: Path, folder: Path) -> Path:
    """Make `latest` a link to `folder`, or a copy of it where there are no links."""
    new = latest.with_name(f".latest-{os.getpid()}")
    try:
        new.symlink_to(folder.name, target_is_directory=True)
    except OSError:  # a file system without links
        shutil.copytree(folder, new)
    if latest.is_symlink() and not new.is_symlink():
        latest.unlink()
    elif latest.is_dir() and not latest.is_symlink():
        shutil.rmtree(latest)
    os.replace(new, latest)
    return latest
