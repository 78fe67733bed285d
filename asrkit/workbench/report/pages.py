"""The folder of static pages about a run of notebooks; no page makes a request."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from pygments.formatters import HtmlFormatter

from asrkit import files
from asrkit.shapes import count
from asrkit.workbench import machine, records
from asrkit.workbench.claims.answers import (
    OUTCOME_OF_VERDICT,
    OUTCOMES,
    claim_row,
    count_outcomes,
    document_answers,
    listed,
    settled_elsewhere,
    summary,
)
from asrkit.workbench.claims.claims import Claim, load_claims
from asrkit.workbench.claims.verdicts import LEGEND, NOT_COMPARABLE, Verdict, origin, verdict
from asrkit.workbench.records import Record
from asrkit.workbench.report.execute import SITE_PAGES, NotebookRun
from asrkit.workbench.report.findings import findings_of, value_with_unit
from asrkit.workbench.report.notebook import (
    GLOSSARY,
    SIGNS,
    TEMPLATES,
    Page,
    glossary_html,
    mark_of,
    render,
)

Row = dict[str, Any]

MEANINGS = {  # mark -> what it means for a published number
    "good": "measured or computed, and agrees",
    "mild": "agrees in part",
    "bad": "disagrees",
    "soft": "not settled here",
}
# Styles of Pygments for light and dark; a test measures their contrast.
CODE_STYLES = ("default", "github-dark")
SLOWEST_SHOWN = 8


def build(
    folder: Path, runs: Sequence[NotebookRun], seconds: float, plan: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Write a page for each notebook, the pages about the run and, last, manifest.json.

    Args:
        folder: Folder of the report; `folder/runs` has the executed notebooks.
        runs: Outcomes of the notebooks, in the order of their pages.
        seconds: Duration of the whole run.
        plan: Arguments of the run: size, device, commands.

    Returns:
        A sentence that summarises the run, and the defects of the pages.
    """
    fresh = [record for run in runs for record in run.records]
    rows = claim_rows(fresh)
    verdicts = {row["id"]: row["verdict"] for row in rows}
    names = [run.name for run in runs]
    terms = _glossary(folder, plan)
    linked = [*names, GLOSSARY] if terms else names
    site_pages = {name: text for name, text in SITE_PAGES.items() if name != GLOSSARY or terms}
    pages = {run.name: _page(folder, run, verdicts, linked) for run in runs}
    failed = [run for run in runs if run.status != "ran"]
    ran = f"{len(runs) - len(failed)} of {count(len(runs), 'notebook')} ran"
    slowest = [(*cell, run.name) for run in runs for cell in run.slowest]
    defects = [f"{name}: {defect}" for name, page in pages.items() for defect in page.defects]
    context = {
        "seconds": seconds,
        "plan": plan,
        "runs": runs,
        "failed": failed,
        "pages": pages,
        "now": f"{datetime.datetime.now(datetime.UTC):%F %H:%M} UTC",
        "lead": f"{ran} in {_time_and_place(seconds)}.",
        "counts": count_outcomes(rows),
        "elsewhere": settled_elsewhere(rows),
        "defects": defects,
        "findings": findings_of(runs),
        "documents": document_answers(rows),
        "claims": listed(rows),
        "appendix": [row for row in rows if row["appendix"]],
        "facts": _facts(),
        "slowest": sorted(slowest, reverse=True)[:SLOWEST_SHOWN],
        "terms": terms,
        "site_pages": site_pages,
    }
    for name in site_pages:
        write_page(folder / f"{name}.html", f"{name}.html.j2", **context)
    for run, before, after in zip(runs, ["", *names], [*names[1:], ""], strict=False):
        write_page(
            folder / f"{run.name}.html",
            "notebook.html.j2",
            **context,
            run=run,
            page=pages[run.name],
            before=before,
            after=after,
        )
    sentence = f"{ran}. {summary(rows)}"
    manifest = {
        "sentence": sentence,
        "runs": [{**asdict(run), "records": len(run.records)} for run in runs],
        "plan": plan,
        "seconds": seconds,
        "claims": verdicts,
        "machine": machine.this_machine(),
        "software": machine.software(),
        "code": machine.code(),
    }
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1, default=str))
    return sentence, defects


def _time_and_place(seconds: float) -> str:
    """The duration of a run and its machine: "8 minutes on AMD EPYC 9R14 with 2 cores"."""
    here = machine.this_machine()
    cpu = f"{here['cpu_model']} with {here['cpu_usable']} cores"
    device = " and ".join([cpu, *(gpu["name"] for gpu in here["gpus"])])
    duration = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    return f"{duration} on {device}"


def write_page(path: Path, template: str, **context: Any) -> None:
    """Render a page.

    Args:
        path: The HTML file to write.
        template: Name of a file in templates/.
        **context: Variables of the template, in addition to those of every template.
    """
    write_text(path, _environment().get_template(template).render(**context))


def write_text(path: Path, text: str) -> None:
    """Write a text file with Unix line endings, completely or not at all."""
    with files.atomic(path) as part:
        part.write_text(text, "utf-8", newline="\n")


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates, with the variables of every template: style, script, legend and functions."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True
    )
    light, dark = map(_code_style, CODE_STYLES)
    environment.globals |= {
        "css": f"{(TEMPLATES / 'style.css').read_text('utf-8')}{light}\n"
        f"@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}",
        "js": (TEMPLATES / "report.js").read_text("utf-8"),
        "mark_of": mark_of,
        "marks": [(mark, sign, MEANINGS[mark]) for mark, sign in SIGNS.items()],
        "legend": LEGEND,
        "of_label": OUTCOME_OF_VERDICT,
        "outcomes": OUTCOMES,
        "count": count,
        "value_with_unit": value_with_unit,
        "conditions": _conditions,
        "arms": _arms,
    }
    return environment


def _code_style(name: str) -> str:
    """The colours of code in a style of Pygments, without backgrounds."""
    lines = HtmlFormatter(style=name).get_style_defs(".highlight").splitlines()
    unused = (".highlight .hll", ".highlight .w ")
    kept = [
        line for line in lines if line.startswith(".highlight .") and not line.startswith(unused)
    ]
    return re.sub(r"background-color: [^;}]*;?", "", "\n".join(kept))


def _page(
    folder: Path, run: NotebookRun, verdicts: Mapping[str, str], names: Sequence[str]
) -> Page:
    executed = folder / "runs" / f"{run.name}.ipynb"
    if executed.is_file():
        return render(executed, verdicts, names)
    return Page(title=run.name, records={})


def _glossary(folder: Path, plan: Mapping[str, Any]) -> str:
    """The glossary beside the notebooks as HTML; empty if there is none."""
    path = folder / Path(plan["notebooks"][0]).parent / f"{GLOSSARY}.md"
    return glossary_html(path) if path.is_file() else ""


def claim_rows(fresh: Sequence[Record]) -> list[Row]:
    """The rows of the claims page; its columns are in claims.html.j2.

    Args:
        fresh: Records of this run, which are added to those that asrkit ships.
    """
    folder = files.shipped("records")
    shipped = records.read(folder) if any(folder.rglob("*.jsonl")) else []
    measured_now = {record["what"] for record in fresh}
    rows = []
    for claim in load_claims():
        judged = verdict(claim, [*shipped, *fresh])
        names = {claim.id, *(entry["what"] for entry in claim.evidence)}
        is_earlier = judged.measured is not None and not claim.formula and not names & measured_now
        evidence = _evidence(claim, judged)
        rows.append({**claim_row(claim, judged), "is_earlier": is_earlier, "beside": evidence})
    return rows


def _evidence(claim: Claim, judged: Verdict) -> list[str]:
    """Values measured close to a claim: what was measured, where, and what differs."""
    if judged.label == NOT_COMPARABLE:  # the reason already lists them
        return []
    return [
        f"{claim.show(item.record['value'])}, {_arms(item.record)}, on {origin(item.record)}: "
        f"{item.why}"
        for item in judged.evidence
    ]


def _conditions(record: Record) -> str:
    """The conditions of a record: "dtype=float32, B=2, T=80"."""
    params = record["params"]
    return ", ".join(f"{name}={params[name]}" for name in records.CONDITIONS if name in params)


def _arms(record: Record) -> str:
    """The implementation that a record measured, or the two sides of a ratio."""
    return " / ".join(map(str, record["params"].get("arms", ()))) or str(record["impl"])


def _facts() -> dict[str, Any]:
    """Facts about this machine, its software and the code, by name."""
    here = machine.this_machine()
    software = machine.software()
    code = machine.code()
    changed = " with uncommitted changes" if code["dirty"] else ""
    gpus = [f"{gpu['name']}, {gpu['memory.total']} MiB" for gpu in here["gpus"]]
    facts = {
        "machine id": here["id"],
        "CPU": here["cpu_model"],
        "cores": here["cpu_usable"],
        "memory, GiB": here["ram_gib"],
        "instructions": " ".join(here["isa"]),
        "GPU": "; ".join(gpus),
        "system": here["system"],
        "kernel": here["kernel"],
        **{name: software[name] for name in ("python", "torch", "cuda", "numpy", "numba")},
        "commit": f"{str(code['commit'])[:9]}{changed}" if code["commit"] else "",
    }
    return {name: value for name, value in facts.items() if value}
