"""`asrkit report`: run notebooks and write a folder of pages about them."""

import datetime
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench.report.execute import NotebookRun, jobs_of, run_notebooks
from asrkit.workbench.report.pages import build, write_text

DEFAULTS: dict[str, Any] = {"parameters": {}, "size": "quick", "device": "auto", "timeout_s": None}
TIMEOUT_S = {"quick": 600.0, "full": 7200.0}  # time limit of a cell, by size


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    """The path of the report, and the outcome of the run."""

    path: Path
    runs: Sequence[NotebookRun]
    sentence: str
    seconds: float
    defects: Sequence[str]

    @property
    def failed(self) -> list[NotebookRun]:
        """The notebooks that did not complete."""
        return [run for run in self.runs if run.status != "ran"]

    @property
    def exit_code(self) -> int:
        """0 if every notebook is complete and no page has a defect, else 1."""
        return int(bool(self.failed or self.defects))

    def summary(self) -> str:
        """Failures and defects, a line each, then a sentence about the run."""
        problems = [run.line() for run in self.failed]
        return "\n".join([*problems, *self.defects, self.sentence])

    def facts(self) -> dict[str, Any]:
        """The result for programs: counts of notebooks, records and defects, seconds, and path."""
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
    """Run notebooks and write `out/<time>/index.html`; `out/latest` then points to the folder.

    `latest` moves when the whole folder is written, so an interrupted run leaves the last report in
    place.

    Args:
        notebooks: Paths of the notebooks; by default notebooks/*.ipynb.
        out: Folder of all reports.
        parameters: Values for the notebooks that declare them. Each name must be declared by at
            least one notebook.
        size: "quick" or "full"; "full" sets the larger parameters that a notebook declares.
        device: "auto", "cpu" (hides GPUs from the notebooks) or "cuda".
        jobs: Notebooks that run at once; by default half as many as there are cores, or as many as
            cores if no notebook measures time.
        timeout_s: Time limit of a cell in seconds; by default 600, or 7200 at full size.
        progress: Print a line when a notebook starts, and one when it ends.
        resume: Finish the newest run in `out`. Arguments of this call replace those of that run,
            and notebooks that they affect run again.

    Raises:
        ValueError: An argument is wrong; nothing has run then.
    """
    start = time.perf_counter()
    out = Path(out)
    if resume:
        folder, plan, paths = _newest(out, notebooks)
    else:
        folder = out / f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}Z-{os.getpid()}"
        plan = dict(DEFAULTS)
        paths = sorted(Path("notebooks").glob("*.ipynb")) if notebooks is None else [*notebooks]
    changes = {
        "parameters": parameters or None,
        "size": size,
        "device": device,
        "timeout_s": timeout_s,
    }
    plan |= {name: value for name, value in changes.items() if value is not None}
    planned = jobs_of(paths, plan["parameters"], plan["size"], plan["device"])
    limit = plan["timeout_s"]
    if limit is None:
        limit = TIMEOUT_S[plan["size"]]
    expect(0 < limit < math.inf, "timeout_s", "a number of seconds above 0", limit)
    expect(jobs is None or jobs > 0, "jobs", "at least 1", jobs)
    busy = f"resume: expected a run that has ended, got one that is running now, {folder.name}."
    with files.lock(folder, message=busy):
        plan["notebooks"] = [os.path.relpath(path, folder) for path in paths]
        plan["commands"] = [*plan.get("commands", []), _command_line()]
        write_text(folder / "plan.json", json.dumps(plan, indent=1, default=str))
        runs = run_notebooks(
            planned,
            folder / "runs",
            at_once=jobs,
            timeout_s=limit,
            progress=progress,
            resume=resume,
        )
        for run in runs:
            lines = [json.dumps(record) + "\n" for record in run.records]
            write_text(folder / f"records/{run.name}.jsonl", "".join(lines))
        seconds = time.perf_counter() - start  # the same number on the page and in the summary
        sentence, defects = build(folder, runs, seconds, plan)
    path = _point(out / "latest", folder) / "index.html"
    return ReportResult(path=path, runs=runs, sentence=sentence, seconds=seconds, defects=defects)


def _newest(
    out: Path, notebooks: Sequence[Path] | None
) -> tuple[Path, dict[str, Any], Sequence[Path]]:
    """Folder, plan and notebooks of the run to finish."""
    folders = [plan.parent for plan in out.glob("*/plan.json") if plan.parent.name != "latest"]
    expect(bool(folders), "resume", f"a run in {out}", "none", "Drop --resume.")
    folder = max(folders)
    file = folder / "plan.json"
    try:
        plan = {**DEFAULTS, **json.loads(file.read_text("utf-8"))}
        paths = [Path(os.path.relpath(folder / name)) for name in plan["notebooks"]]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"resume: expected a plan of asrkit report in {file}.") from None
    planned = ", ".join(path.stem for path in paths)
    named = ", ".join(path.stem for path in notebooks or paths)
    wanted = f"none with --resume, which finishes {folder.name}: {planned}"
    expect(named == planned, "notebooks", wanted, named, "Drop them, or drop --resume.")
    return folder, plan, paths


def _command_line() -> str:
    """The command as typed, with the home folder as `~`: `asrkit report --out ~/reports`."""
    return shlex.join(["asrkit", *sys.argv[1:]]).replace(f"{Path.home()}/", "~/")


def _point(latest: Path, folder: Path) -> Path:
    """Make `latest` a link to `folder`, or a copy of it on a file system without links."""
    new = latest.with_name(f".latest-{os.getpid()}")
    try:
        new.symlink_to(folder.name, target_is_directory=True)
    except OSError:  # a file system without links
        shutil.copytree(folder, new)
    if latest.is_dir() and not latest.is_symlink():
        shutil.rmtree(latest)
    os.replace(new, latest)
    return latest
