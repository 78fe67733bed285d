"""A run of the notebooks and one folder of static pages from it: one style, one script, both
hashed; no request to anywhere.
"""

import base64
import datetime
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from pygments.formatters import HtmlFormatter

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import ledger
from asrkit.workbench import machine as stamp
from asrkit.workbench import records as store
from asrkit.workbench.report.pages import LEGEND, MARKS, Page, measured, page
from asrkit.workbench.report.run import NotebookRun, jobs_of, run_notebooks

HERE = Path(__file__).parent
CSP = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; media-src data:"
CODE_STYLES = (
    "default",
    "github-dark",
)  # of Pygments, for light and dark; a test counts their contrast
FACTS = {
    "id": "machine id",
    "cpu_model": "CPU",
    "cpu_usable": "cores",
    "ram_gib": "memory, GiB",
    "isa": "instructions",
    "system": "system",
    "kernel": "kernel",
}


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    """Where the report is and how the run went; exit_code is 0 only if every notebook ran and every
    picture has words.
    """

    path: Path
    runs: Sequence[NotebookRun]
    sentence: str
    seconds: float
    defects: Sequence[str]

    @property
    def exit_code(self) -> int:
        """0 or 1."""
        return int(any(run.status != "ran" for run in self.runs) or bool(self.defects))

    def summary(self) -> str:
        """Failures and defects, one a line, then a sentence on the whole."""
        problems = [run.line() for run in self.runs if run.status != "ran"]
        return "\n".join([*problems, *self.defects, self.sentence])

    def facts(self) -> dict[str, Any]:
        """The result for programs: numbers of notebooks, records and defects, seconds, and path."""
        return {
            "notebooks": len(self.runs),
            "ran": sum(run.status == "ran" for run in self.runs),
            "records": sum(len(run.records) for run in self.runs),
            "seconds": round(self.seconds, 1),
            "defects": len(self.defects),
            "path": str(self.path),
        }


def report(
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
    """Run `notebooks` (default: notebooks/*.ipynb) and build `out`/<time>/index.html; `out`/latest
    points to it.

    The folder holds plan.json, runs/ (executed copies, results), records/, the pages and, written
    last, manifest.json. `latest` moves when all of it stands, so a run that is cut short leaves the
    last report in place. `resume` takes up the newest run in `out` if it was cut short or had
    failures; what is given here wins over its plan, and what that changes runs again.
    """
    start, out = time.perf_counter(), Path(out)
    given = {
        "parameters": dict(parameters) if parameters else None,
        "size": size,
        "device": device,
        "timeout_s": timeout_s,
    }
    plan: dict[str, Any] = {"parameters": {}, "size": "quick", "device": "auto", "timeout_s": None}
    if resume:
        folder = unfinished(out)
        plan |= _plan(folder)
        paths = [Path(os.path.relpath(folder / name)) for name in plan["notebooks"]]
        named, planned = ({path.stem for path in some} for some in (notebooks or paths, paths))
        expect(
            named == planned,
            "notebooks",
            f"none beside --resume, which finishes {folder.name}: {', '.join(sorted(planned))}",
            ", ".join(sorted(named)),
            "Leave them or --resume away.",
        )
    else:
        folder = out / f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}Z-{os.getpid()}"
        paths = sorted(Path("notebooks").glob("*.ipynb")) if notebooks is None else list(notebooks)
    plan |= {name: value for name, value in given.items() if value is not None}
    jobs_of(
        paths, plan["parameters"], plan["size"], plan["device"]
    )  # refuses before a folder is made
    limit = plan["timeout_s"]
    expect(limit is None or 0 < limit < math.inf, "timeout_s", "a number of seconds above 0", limit)
    expect(jobs is None or jobs > 0, "jobs", "at least 1", jobs)
    with files.alone(
        folder,
        lock=".lock",
        refused=f"resume: expected a run that has ended, got one that is running now, {folder.name}.",
    ):
        plan["commands"] = [*plan.get("commands", []), command(sys.argv)]
        plan["notebooks"] = [os.path.relpath(path, folder) for path in paths]
        _write(folder / "plan.json", json.dumps(plan, indent=1, default=str))
        (folder / "manifest.json").unlink(missing_ok=True)
        timeout = limit or (600.0 if plan["size"] == "quick" else 7200.0)
        runs = run_notebooks(
            paths,
            folder / "runs",
            parameters=plan["parameters"],
            size=plan["size"],
            device=plan["device"],
            jobs=jobs,
            timeout_s=timeout,
            progress=progress,
            resume=resume,
        )
        for run in runs:
            if run.records:
                lines = "".join(json.dumps(record) + "\n" for record in run.records)
                _write(folder / "records" / f"{run.name}.jsonl", lines)
        seconds = time.perf_counter() - start  # one number, on the page and in the summary
        sentence, defects = build(folder, runs, seconds, plan)
    latest = _point(out / "latest", folder)
    return ReportResult(
        path=latest / "index.html", runs=runs, sentence=sentence, seconds=seconds, defects=defects
    )


def unfinished(out: Path) -> Path:
    """The newest run in `out`, if it was cut short or a notebook of it failed; ValueError says why
    there is none.
    """
    last = max(
        (plan.parent for plan in out.glob("*/plan.json") if plan.parent.name != "latest"),
        default=None,
    )
    expect(last is not None, "resume", f"a run in {out}", "none", "Leave --resume away.")
    assert last is not None
    told, latest = (folder / "manifest.json" for folder in (last, out / "latest"))
    whole = told.is_file() and latest.is_file() and told.read_bytes() == latest.read_bytes()
    failed = (
        [run for run in json.loads(told.read_text("utf-8"))["runs"] if run["status"] != "ran"]
        if whole
        else []
    )
    expect(
        not whole or bool(failed),
        "resume",
        "a run that was cut short or had failures",
        f"{last.name}, which is whole",
        "Leave --resume away.",
    )
    return last


def _plan(folder: Path) -> dict[str, Any]:
    """What plan.json of a run says; ValueError where another program wrote it, or half of it is
    there.
    """
    try:
        plan = json.loads((folder / "plan.json").read_text("utf-8"))
    except ValueError:
        plan = None
    kinds = {"notebooks": list, "parameters": dict, "size": str, "device": str}
    whole = (
        isinstance(plan, dict)
        and "notebooks" in plan
        and all(isinstance(plan.get(k, kind()), kind) for k, kind in kinds.items())
    )
    whole = whole and all(isinstance(name, str) for name in plan["notebooks"])
    whole = whole and isinstance(plan.get("timeout_s"), int | float | None)
    expect(
        whole,
        "resume",
        f"a plan of asrkit report in {folder / 'plan.json'}",
        "another or a torn file",
        "Move the folder away.",
    )
    return dict(plan)


def _point(latest: Path, folder: Path) -> Path:
    link = latest.with_name(f".latest-{os.getpid()}")
    try:
        link.symlink_to(folder.name, target_is_directory=True)
    except OSError:  # a file system without links
        shutil.copytree(folder, link)
    if latest.is_dir() and not (latest.is_symlink() and link.is_symlink()):
        latest.unlink() if latest.is_symlink() else shutil.rmtree(latest)
    os.replace(link, latest)
    return latest


def _write(path: Path, text: str) -> None:
    with files.atomic(path) as part:
        part.write_text(text, "utf-8", newline="\n")


@cache
def site() -> tuple[jinja2.Environment, dict[str, Any]]:
    """Templates, and what every page is rendered with: style, script and the policy that allows
    just these two.
    """
    css, (light, dark) = (
        (HERE / "templates/style.css").read_text("utf-8"),
        map(_tokens, CODE_STYLES),
    )
    css += f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}"
    js = (HERE / "templates/report.js").read_text("utf-8")
    style, script = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (css, js)
    )
    csp = f"{CSP}; style-src {style}; script-src {script}"
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True
    )
    return templates, {"css": css, "js": js, "csp": csp, "marks": MARKS, "legend": LEGEND}


def _tokens(style: str) -> str:
    lines = HtmlFormatter(style=style).get_style_defs(".highlight").splitlines()
    kept = [
        line
        for line in lines
        if line.startswith(".highlight .")
        and not line.startswith((".highlight .hll", ".highlight .w "))
    ]
    return re.sub(r"background-color: [^;}]*;?", "", "\n".join(kept))


def build(
    folder: Path, runs: Sequence[NotebookRun], seconds: float, plan: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Write a page a notebook, index.html and, last, manifest.json into `folder`; the summary
    sentence, and defects found.
    """
    templates, common = site()
    shipped = (
        store.read(files.shipped("records"))
        if any(files.shipped("records").rglob("*.jsonl"))
        else []
    )
    fresh = [record for run in runs for record in run.records]
    rows = claims(shipped, fresh)
    verdicts, defects, pages = {row["id"]: row["verdict"] for row in rows}, [], dict[str, Page]()
    names = [run.name for run in runs]
    for number, run in enumerate(runs):
        executed = folder / "runs" / f"{run.name}.ipynb"
        blank = Page(title=run.name, body="", figures=[], records={}, claims=[], defects=[])
        pages[run.name] = told = (
            page(executed, verdicts, [one.name for one in runs]) if executed.is_file() else blank
        )
        defects += [f"{run.name}: {what}" for what in [*run.defects, *told.defects]]
        published = [
            measured(record, run.name, [*verdicts])
            for cell in told.records.values()
            for record in cell
        ]
        before, after = ["", *names][number], [*names, ""][number + 1]
        text = templates.get_template("notebook.html.j2").render(
            **common, before=before, after=after, page=told, run=run, rows=published
        )
        _write(folder / f"{run.name}.html", text)
    series = {
        path.stem for path in (files.HERE.parent / "notebooks").glob("*.ipynb")
    }  # none in an installed package
    for row in rows:
        there = (
            f"#claim-{row['id']}"
            if (named := pages.get(row["notebook"])) and row["id"] in named.claims
            else ""
        )
        row["href"] = f"{row['notebook']}.html{there}" if row["notebook"] in pages else ""
        row["absent"] = (
            ""
            if row["href"]
            else "not in this run"
            if row["notebook"] in series
            else "to come"
            if series
            else ""
        )
    sentence = f"{sum(run.status == 'ran' for run in runs)} of {len(runs)} notebooks ran. {ledger.summary(rows)}"
    context = _context(rows, runs, pages, shipped, fresh) | {
        "sentence": sentence,
        "defects": defects,
        "seconds": seconds,
        "plan": plan,
        "command": "\n".join(plan.get("commands") or [command(sys.argv)]),
    }
    _write(
        folder / "index.html", templates.get_template("index.html.j2").render(**common, **context)
    )
    listed = [{**asdict(run), "records": len(run.records)} for run in runs]
    told_machine = {
        name: context[name] for name in ("machine", "software", "code", "command", "now")
    }
    manifest = {
        "sentence": sentence,
        "runs": listed,
        "plan": plan,
        "seconds": seconds,
        "claims": verdicts,
        **told_machine,
    }
    _write(folder / "manifest.json", json.dumps(manifest, indent=1, default=str))
    return sentence, defects


def claims(shipped: Sequence[Any], fresh: Sequence[Any]) -> list[dict[str, Any]]:
    """The ledger's rows with what the page sorts by, and where each recorded and measured value is
    from.
    """
    rows, seen = [], {record["what"] for record in fresh}
    every = ledger.load_claims()
    for claim, told in zip(every, ledger.table(every, [*shipped, *fresh]), strict=True):
        found = ledger.verdict(claim, [*shipped, *fresh])
        record, known, where, gpu = found.recorded, found.measured is not None, "", None
        if record:
            gpu = next(iter(record["machine"]["gpus"]), None)
            where = (
                f"{gpu['name']}, driver {gpu['driver_version']}"
                if gpu
                else f"another CPU: {record['machine']['cpu_model']}"
            )
            where += f", torch {record['software']['torch']}, {store.written(record)}, {record['captured_at'][:10]}"
        how = (
            "computed"
            if claim.formula
            else "earlier, on a machine of this kind" * (claim.id not in seen)
        )
        rows.append(
            {
                **told,
                "published": told["published"] + " of a table" * (claim.unit == "lines"),
                "on_gpu": bool(gpu) or not record,
                "recorded": claim.show(record["value"])
                if record
                else "–"
                if claim.needs == "cpu"
                else "not recorded yet",
                "where": where,
                "how": how * known,
                "published_value": "" if claim.quoted is None else claim.quoted,
                "measured_value": found.measured if known else "",
                "recorded_value": record["value"] if record else "",
                "order": ledger.LABELS.index(found.label),
            }
        )
    return rows


def _context(
    rows: list[dict[str, Any]],
    runs: Sequence[NotebookRun],
    pages: Mapping[str, Page],
    shipped: Sequence[Any],
    fresh: Sequence[Any],
) -> dict[str, Any]:
    """What the index shows beside the sentence."""
    machine, software, code = stamp.this_machine(), stamp.software(), stamp.code()
    others = [
        *{r["machine"]["id"]: r for r in shipped if r["machine"]["id"] != machine["id"]}.values()
    ]
    others = sorted(others, key=lambda r: (not r["machine"]["gpus"], r["captured_at"]))[:3]
    columns = [{"machine": machine, "software": software, "code": code, "captured_at": ""}, *others]
    groups = {
        row["document"]: {"document": row["document"], "title": row["title"], "url": row["url"]}
        for row in reversed(rows)
    }
    for name, group in groups.items():
        group["rows"] = [row for row in rows if row["document"] == name]
    figures = [
        {
            **figure,
            "notebook": name,
            "total": sum(map(len, told.records.values())),
            "records": [measured(record) for record in told.records.get(figure["cell"], [])],
        }
        for name, told in pages.items()
        for figure in told.figures
    ]
    counts = Counter(row["verdict"] for row in rows)
    return {
        "rows": rows,
        "groups": sorted(groups.values(), key=lambda group: group["document"]),
        "runs": runs,
        "figures": figures,
        "counts": [(label, counts[label]) for label in ledger.LABELS if counts[label]],
        "failed": [run for run in runs if run.status != "ran"],
        "titles": {name: told.title for name, told in pages.items() if told.title != name},
        "machine": machine,
        "software": software,
        "code": code,
        "others": others,
        "facts": facts(columns),
        "gpus": any(r["machine"]["gpus"] for r in [*shipped, *fresh]),
        "commit": (code["commit"] or "") + "+" * bool(code["dirty"]),
        "slowest": sorted(
            ((s, cell, run.name) for run in runs for cell, s in run.slowest), reverse=True
        )[:8],
        "records": [
            measured(record, run.name, [row["id"] for row in rows])
            for run in runs
            for record in run.records
        ],
        "now": f"{datetime.datetime.now(datetime.UTC):%F %H:%M} UTC",
    }


def facts(columns: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Rows (name, a value for each column) of machine, GPU, software, commit and day, from records
    or a manifest.
    """
    machines = [column["machine"] for column in columns]
    told = [
        (name, [" ".join(m[key]) if key == "isa" else str(m[key]) for m in machines])
        for key, name in FACTS.items()
    ]
    for key, name in {
        "name": "GPU",
        "memory.total": "GPU memory",
        "driver_version": "driver",
    }.items():
        told.append((name, [", ".join(gpu[key] for gpu in m["gpus"]) or "–" for m in machines]))
    for name in ("python", "torch", "cuda", "torchaudio", "numpy", "numba", "lhotse"):
        told.append((name, [str(column["software"].get(name) or "–") for column in columns]))
    commits = [
        str(c["code"]["commit"] or "–")[:9] + " with changes" * bool(c["code"]["dirty"])
        for c in columns
    ]
    return [
        *told,
        ("commit", commits),
        ("recorded", [str(column.get("captured_at", ""))[:10] or "now" for column in columns]),
    ]


def command(argv: Sequence[str]) -> str:
    """The command line as it was typed, only home as `~`: `asrkit report 02 --out ~/reports`."""
    programs = [Path(program).name for program in argv[:1]]
    ours = programs in (["asrkit"], ["cli.py"], ["__main__.py"], ["__init__.py"])
    return shlex.join([*(["asrkit"] if ours else programs), *argv[1:]]).replace(
        f"{Path.home()}/", "~/"
    )
