"""The folder of static pages that a run of notebooks becomes; no page makes a request."""

import datetime
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.workbench import machine, records
from asrkit.workbench.ledger import LABELS, summary
from asrkit.workbench.report.columns import Record, Row, claim_rows, machine_rows, record_columns
from asrkit.workbench.report.frame import write_page, write_text
from asrkit.workbench.report.notebook_page import Page, render_page
from asrkit.workbench.report.notebook_run import NotebookRun
from asrkit.workbench.report.plan import command_line

REFERENCE_MACHINES = 3  # shown beside this one, those with a GPU first
SLOWEST_CELLS = 8


def build(
    folder: Path, runs: Sequence[NotebookRun], seconds: float, plan: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Write a page a notebook, index.html and, last, manifest.json.

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
    origin = {
        "machine": machine.this_machine(),
        "software": machine.software(),
        "code": machine.code(),
        "command": "\n".join(plan.get("commands") or [command_line(sys.argv)]),
        "now": f"{datetime.datetime.now(datetime.UTC):%F %H:%M} UTC",
    }
    write_page(
        folder / "index.html",
        "index.html.j2",
        sentence=sentence,
        defects=defects,
        seconds=seconds,
        plan=plan,
        **origin,
        **_claims_context(rows),
        **_runs_context(runs, pages, verdicts),
        **_machines_context(shipped, fresh),
    )
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
    for number, run in enumerate(runs):
        executed = folder / "runs" / f"{run.name}.ipynb"
        if executed.is_file():
            page = render_page(executed, verdicts, names)
        else:
            page = Page(title=run.name, body="", figures=[], records={}, claims=[], defects=[])
        pages[run.name] = page
        published = [record for cell in page.records.values() for record in cell]
        write_page(
            folder / f"{run.name}.html",
            "notebook.html.j2",
            before=neighbours[number],
            after=neighbours[number + 2],
            page=page,
            run=run,
            rows=[record_columns(record, run.name, verdicts) for record in published],
        )
    return pages


def _link_to_pages(rows: Sequence[Row], pages: Mapping[str, Page]) -> None:
    """Add to each claim's row where its notebook's page is, or why there is none."""
    # The series is not in an installed package.
    series = {path.stem for path in (files.HERE.parent / "notebooks").glob("*.ipynb")}
    for row in rows:
        name = row["notebook"]
        row["href"], row["absent"] = "", ""
        if name in pages:
            row["href"] = f"{name}.html"
            if row["id"] in pages[name].claims:
                row["href"] += f"#claim-{row['id']}"
        elif name in series:
            row["absent"] = "not in this run"
        elif series:
            row["absent"] = "to come"


def _claims_context(rows: Sequence[Row]) -> dict[str, Any]:
    """What the index shows of the claims: rows, rows by document, and a count of each verdict."""
    groups = dict[str, Row]()
    for row in rows:
        document = row["document"]
        if document not in groups:
            groups[document] = {
                "document": document,
                "title": row["title"],
                "url": row["url"],
                "rows": [],
            }
        groups[document]["rows"].append(row)
    counts = Counter(row["verdict"] for row in rows)
    return {
        "rows": rows,
        "groups": [groups[document] for document in sorted(groups)],
        "counts": [(label, counts[label]) for label in LABELS if counts[label]],
    }


def _runs_context(
    runs: Sequence[NotebookRun], pages: Mapping[str, Page], verdicts: Mapping[str, str]
) -> dict[str, Any]:
    """What the index shows of the notebooks: how they fared, figures, records, slowest cells."""
    cells = [(seconds, cell, run.name) for run in runs for cell, seconds in run.slowest]
    return {
        "runs": runs,
        "failed": [run for run in runs if run.status != "ran"],
        "titles": {name: page.title for name, page in pages.items() if page.title != name},
        "figures": [figure for name, page in pages.items() for figure in _figures(name, page)],
        "slowest": sorted(cells, reverse=True)[:SLOWEST_CELLS],
        "records": [
            record_columns(record, run.name, verdicts) for run in runs for record in run.records
        ],
    }


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


def _machines_context(shipped: Sequence[Record], fresh: Sequence[Record]) -> dict[str, Any]:
    """What the index shows of this machine, and of those that the shipped records are from."""
    here = {
        "machine": machine.this_machine(),
        "software": machine.software(),
        "code": machine.code(),
    }
    newest = {record["machine"]["id"]: record for record in shipped}  # of each machine
    newest.pop(here["machine"]["id"], None)
    others = sorted(newest.values(), key=_gpus_first)[:REFERENCE_MACHINES]
    commit = here["code"]["commit"] or ""
    if here["code"]["dirty"]:
        commit += "+"
    return {
        "others": others,
        "facts": machine_rows([here, *others]),
        "gpus": any(record["machine"]["gpus"] for record in (*shipped, *fresh)),
        "commit": commit,
    }


def _gpus_first(record: Record) -> tuple[bool, str]:
    return not record["machine"]["gpus"], record["captured_at"]
