"""The folder of static pages that a run of notebooks becomes; no page makes a request."""

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nbformat

from asrkit import files
from asrkit.workbench import machine, records
from asrkit.workbench.claims import summary
from asrkit.workbench.report.claims_page import claims_context, claims_sentence
from asrkit.workbench.report.columns import Record, Row, claim_rows, machine_facts, record_columns
from asrkit.workbench.report.findings import Finding, findings_of
from asrkit.workbench.report.frame import write_page, write_text
from asrkit.workbench.report.notebook_page import Page, render_page, title_of
from asrkit.workbench.report.notebook_run import NotebookRun, count_of_records
from asrkit.workbench.report.plan import command_line

SLOWEST_CELLS = 8


def build(
    folder: Path, runs: Sequence[NotebookRun], seconds: float, plan: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Write a page a notebook, the pages about the run and, last, manifest.json.

    Args:
        folder: Folder of the report; `folder/runs` holds the executed notebooks.
        runs: How the notebooks fared, in the order of their pages.
        seconds: How long the whole run took.
        plan: What was asked for: size, device, commands.

    Returns:
        The sentence that sums the run up, and the defects of the pages.
    """
    shipped = _shipped_records()
    fresh = [record for run in runs for record in run.records]
    rows = claim_rows(shipped, fresh)
    verdicts = {row["id"]: row["verdict"] for row in rows}
    pages = _notebook_pages(folder, runs, verdicts)
    _link_to_pages(rows, pages)
    defects = list[str]()
    for run in runs:
        of_notebook = [*run.defects, *pages[run.name].defects]
        defects += [f"{run.name}: {defect}" for defect in of_notebook]
    ran = sum(run.status == "ran" for run in runs)
    sentence = f"{ran} of {len(runs)} notebooks ran. {summary(rows)}"
    origin = _origin(plan)
    context = {
        "seconds": seconds,
        "plan": plan,
        "runs": runs,
        "failed": [run for run in runs if run.status != "ran"],
        "titles": {name: page.title for name, page in pages.items()},
        **origin,
    }
    found = findings_of(runs)
    index = {
        "lead": _lead(runs, fresh, seconds),
        "claims": claims_sentence(rows),
        "defects": defects,
        "findings": found,
        "cards": _cards(runs, pages, found),
    }
    figures = [figure for name, page in pages.items() for figure in _figures(name, page)]
    published = [
        record_columns(record, run.name, verdicts) for run in runs for record in run.records
    ]
    of_page: dict[str, dict[str, Any]] = {
        "index": index,
        "ledger": claims_context(rows),
        "figures": {"figures": figures},
        "records": {"records": published},
        "machine": {"slowest": _slowest(runs), "facts": machine_facts()},
    }
    for name, more in of_page.items():
        write_page(folder / f"{name}.html", f"{name}.html.j2", **context, **more)
    manifest = {
        "sentence": sentence,
        "runs": [{**asdict(run), "records": len(run.records)} for run in runs],
        "plan": plan,
        "seconds": seconds,
        "claims": verdicts,
        **origin,
    }
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1, default=str))
    return sentence, defects


def _slowest(runs: Sequence[NotebookRun]) -> list[tuple[float, str, str]]:
    """(seconds, cell, notebook) of the slowest cells of a run."""
    cells = [(seconds, cell, run.name) for run in runs for cell, seconds in run.slowest]
    return sorted(cells, reverse=True)[:SLOWEST_CELLS]


def _origin(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Where, from which code, by which command and when a report is made."""
    return {
        "machine": machine.this_machine(),
        "software": machine.software(),
        "code": machine.code(),
        "command": "\n".join(plan.get("commands") or [command_line(sys.argv)]),
        "now": f"{datetime.datetime.now(datetime.UTC):%F %H:%M} UTC",
    }


def _lead(runs: Sequence[NotebookRun], fresh: Sequence[Record], seconds: float) -> str:
    """The run in one sentence."""
    here = machine.this_machine()
    cpu = f"{here['cpu_model']} with {here['cpu_usable']} cores"
    device = " and ".join([cpu, *(gpu["name"] for gpu in here["gpus"])])
    ran = sum(run.status == "ran" for run in runs)
    return (
        f"{ran} of {len(runs)} notebooks ran in {_duration(seconds)} on {device} and published "
        f"{count_of_records(fresh)}."
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes"


def _cards(
    runs: Sequence[NotebookRun], pages: Mapping[str, Page], found: Sequence[Finding]
) -> list[Row]:
    """What the index shows of each notebook: question, answer of this run, picture, minutes."""
    first_finding = dict[str, str]()
    for finding in found:
        first_finding.setdefault(finding.notebook, finding.sentence)
    cards = []
    for run in runs:
        page = pages[run.name]
        number, _, _ = run.name.partition("_")
        cards.append(
            {
                "name": run.name,
                "number": number if number.isdigit() else "",
                "title": page.title,
                "answer": page.answer or first_finding.get(run.name, ""),
                "cover": page.cover,
                "minutes": page.minutes,
                "seconds": run.seconds,
                "status": run.status,
            }
        )
    return cards


def _shipped_records() -> Sequence[Record]:
    folder = files.shipped("records")
    if not any(folder.rglob("*.jsonl")):
        return []
    return records.read(folder)


def _notebook_pages(
    folder: Path, runs: Sequence[NotebookRun], verdicts: Mapping[str, str]
) -> dict[str, Page]:
    """Write a page for each notebook, which links to the pages before and after it."""
    pages = dict[str, Page]()
    names = [run.name for run in runs]
    neighbours = ["", *names, ""]
    executed = {name: folder / "runs" / f"{name}.ipynb" for name in names}
    titles = {name: _title(path) for name, path in executed.items()}
    for number, run in enumerate(runs):
        page = Page(title=run.name)
        if executed[run.name].is_file():
            page = render_page(executed[run.name], verdicts, titles)
        pages[run.name] = page
        published = [record for cell in page.records.values() for record in cell]
        write_page(
            folder / f"{run.name}.html",
            "notebook.html.j2",
            before=neighbours[number],
            after=neighbours[number + 2],
            page=page,
            run=run,
            titles=titles,
            rows=[record_columns(record, run.name, verdicts) for record in published],
        )
    return pages


def _title(executed: Path) -> str:
    """Title of a notebook, or its name where it has none or there is no copy."""
    if not executed.is_file():
        return executed.stem
    return title_of(nbformat.read(executed, 4)) or executed.stem


def _link_to_pages(rows: Sequence[Row], pages: Mapping[str, Page]) -> None:
    """Add to each claim's row where its notebook's page is; nowhere if it did not run."""
    for row in rows:
        name = row["notebook"]
        row["href"] = ""
        row["page"] = name
        if name in pages:
            row["href"] = f"{name}.html"
            row["page"] = pages[name].title
            if row["id"] in pages[name].claims:
                row["href"] += f"#claim-{row['id']}"


def _figures(notebook: str, page: Page) -> list[Row]:
    """The figures of a page, each with the records that its cell published."""
    total = sum(len(published) for published in page.records.values())
    figures = []
    for figure in page.figures:
        published = page.records.get(figure["cell"], [])
        figures.append(
            {
                **figure,
                "notebook": notebook,
                "total": total,
                "records": [record_columns(record) for record in published],
            }
        )
    return figures
