"""One executed notebook as the body of one HTML page."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup, Tag
from nbconvert import HTMLExporter

from asrkit.workbench.records import MIME, problem
from asrkit.workbench.report.notebook_run import count_of_records
from asrkit.workbench.report.prose import BROKEN_FORMULA, prose
from asrkit.workbench.report.sanitise import clean

WIDGET = "application/vnd.jupyter.widget-view+json"
NOTEBOOK_LINK = re.compile(r"^([\w.-]+)\.ipynb(?:#.*)?$")
CELL_ID = "cell-id="
NO_WORDS = "No description has been provided for this image"  # nbconvert's alt text without one

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A notebook's page: title, HTML, and what the report lists of it elsewhere.

    `figures` have alt, src and cell; `records` are by cell id; `claims` are the ids of those that
    the prose names; `defects` say what is wrong with the page.
    """

    title: str
    body: str
    figures: Sequence[Mapping[str, str]]
    records: Mapping[str, Sequence[Record]]
    claims: Sequence[str]
    defects: Sequence[str]


def render_page(executed: Path, verdicts: Mapping[str, str], pages: Collection[str] = ()) -> Page:
    """The page of an executed notebook.

    Args:
        executed: The notebook with its outputs.
        verdicts: Claim id -> label. A comment `<!-- claim-id -->` in the prose becomes a link to
            that claim's row in the ledger.
        pages: Names of the pages of the report. Links to their notebooks lead to them; links to
            other notebooks become text.
    """
    notebook = nbformat.read(executed, 4)
    notebook.metadata.pop("widgets", None)
    title = _title(notebook) or executed.stem
    named = list[str]()
    records = dict[str, list[Record]]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = prose(cell.source, verdicts, named)
        elif cell.cell_type == "code":
            published = _take_records(cell)
            if published:
                records[cell.id] = published
    body = clean(_html(notebook))
    _lead_to_pages(body, pages)
    defects = [
        f"no LaTeX: {code.get_text()}" for code in body.find_all("code", class_=BROKEN_FORMULA)
    ]
    defects += [f"no claim: {name}" for name in dict.fromkeys(named) if name not in verdicts]
    figures, picture_defects = _figures(body)
    return Page(
        title=title,
        body=str(body),
        figures=figures,
        records=records,
        claims=[name for name in named if name in verdicts],
        defects=defects + picture_defects,
    )


def _title(notebook: Any) -> str:
    """The first heading that begins a cell; empty where there is none."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return cell.source.splitlines()[0].removeprefix("# ")
    return ""


def _take_records(cell: Any) -> list[Record]:
    """Records that a cell published; its outputs show how many instead. Widgets are removed."""
    published, shown = [], []
    for output in cell.outputs:
        data = output.get("data", {})
        if MIME in data and not problem(data[MIME]):
            published.append(data[MIME])
        if MIME not in data and WIDGET not in data:
            shown.append(output)
    if published:
        count = count_of_records(published)
        note = f'<p class="kept"><a href="#records">{count}</a> published</p>'
        shown.append(nbformat.v4.new_output("display_data", data={"text/html": note}))
    cell.outputs = shown
    return published


def _html(notebook: Any) -> str:
    exporter = HTMLExporter(
        template_name="basic",
        embed_images=False,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    return exporter.from_notebook_node(notebook)[0]


def _lead_to_pages(body: BeautifulSoup, pages: Collection[str]) -> None:
    """Let links to notebooks lead to their pages; a link to any other notebook becomes text."""
    for link in body.find_all("a", href=NOTEBOOK_LINK):
        match = NOTEBOOK_LINK.match(str(link["href"]))
        name = match[1] if match else ""
        if name in pages:
            link.attrs = {"href": f"{name}.html"}
        else:
            link.unwrap()


def _figures(body: BeautifulSoup) -> tuple[list[Mapping[str, str]], list[str]]:
    """Pictures that have words and are inside the page, and what is wrong with the others.

    A picture that would be loaded from elsewhere is replaced by its words.
    """
    figures = list[Mapping[str, str]]()
    defects = list[str]()
    for image in body.find_all("img"):
        words = str(image.get("alt", "")).replace(NO_WORDS, "").strip()
        source = str(image.get("src", ""))
        is_inside = source.startswith("data:")
        if not words:
            defects.append("a picture has no alt text")
        if not is_inside:
            defects.append("a picture is not inside the page")
            text = body.new_tag("em", attrs={"class": "soft"}, string=words)
            image.replace_with(text)
        elif words:
            figures.append({"alt": words, "src": source, "cell": _cell_of(image)})
    return figures, defects


def _cell_of(image: Tag) -> str:
    cell = image.find_parent(id=re.compile(f"^{CELL_ID}"))
    if cell is None:
        return ""
    return str(cell["id"]).removeprefix(CELL_ID)
