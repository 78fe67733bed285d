"""One executed notebook as the body of one HTML page."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup, Tag
from nbconvert import HTMLExporter

from asrkit.workbench.records import MIME, problem
from asrkit.workbench.report import layout
from asrkit.workbench.report.marks import mark_verdicts
from asrkit.workbench.report.notebook_run import count_of_records
from asrkit.workbench.report.prose import BROKEN_FORMULA, prose
from asrkit.workbench.report.tidy import tidy
from asrkit.workbench.tables import PERCENT, space_percents

WIDGET = "application/vnd.jupyter.widget-view+json"
NOTEBOOK_LINK = re.compile(r"^([\w.-]+)\.ipynb(?:#.*)?$")
INPUT = "input"  # class of the box around a cell's code; "celltag_hide-input" is the whole cell's
NO_WORDS = "No description has been provided for this image"  # nbconvert's alt text without one

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A notebook's page: title, HTML, and what the report lists of it elsewhere.

    `figures` have alt, src and cell; `records` are by cell id; `claims` are the ids of those that
    the prose names; `defects` say what is wrong with the page. `heading` is the title as HTML and
    `takeaway` what this run shows; `cover` is the figure that stands for the page elsewhere;
    `has_marks` is whether there are marks of verdicts.
    """

    title: str
    heading: str = ""
    body: str = ""
    takeaway: str = ""
    minutes: int = 1
    headings: Sequence[layout.Heading] = ()
    figures: Sequence[Mapping[str, str]] = ()
    cover: Mapping[str, str] | None = None
    records: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    claims: Sequence[str] = ()
    has_marks: bool = False
    defects: Sequence[str] = ()

    @property
    def answer(self) -> str:
        """The first line of the takeaway as text."""
        return layout.first_sentence(self.takeaway)


def render_page(
    executed: Path, verdicts: Mapping[str, str], titles: Mapping[str, str] | None = None
) -> Page:
    """The page of an executed notebook.

    Args:
        executed: The notebook with its outputs.
        verdicts: Claim id -> label. A comment `<!-- claim-id -->` in the prose becomes a link to
            that claim's row in the ledger.
        titles: Names and titles of the pages of the report. Links to their notebooks lead to them;
            links to other notebooks become text.
    """
    notebook = nbformat.read(executed, 4)
    notebook.metadata.pop("widgets", None)
    minutes = layout.reading_minutes(notebook.cells)
    named = list[str]()
    records = dict[str, list[Record]]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = prose(cell.source, verdicts, named)
        elif cell.cell_type == "code":
            published = _take_records(cell)
            if published:
                records[cell.id] = published
            _render_markdown_outputs(cell, verdicts, named)
    body = tidy(_html(notebook))
    _lead_to_pages(body, titles or {})
    layout.fold_code(body, notebook.cells)
    _space_percents(body)
    verdict_cells = mark_verdicts(body)
    defects = [
        f"no LaTeX: {code.get_text()}" for code in body.find_all("code", class_=BROKEN_FORMULA)
    ]
    defects += [f"no claim: {name}" for name in dict.fromkeys(named) if name not in verdicts]
    figures, picture_defects = _figures(body)
    claims = [name for name in named if name in verdicts]
    return Page(
        title=title_of(notebook) or executed.stem,
        heading=layout.take_title(body),
        takeaway=layout.lift_takeaways(body, notebook.cells),
        minutes=minutes,
        headings=layout.headings(body),
        body=str(body),
        figures=figures,
        cover=_cover(figures, layout.cover_cells(notebook.cells)),
        records=records,
        claims=claims,
        has_marks=bool(claims) or verdict_cells > 0,
        defects=defects + picture_defects,
    )


def _render_markdown_outputs(cell: Any, verdicts: Mapping[str, str], named: list[str]) -> None:
    """Formulas and tags of claims in Markdown that a cell displays, as in the prose."""
    for output in cell.outputs:
        data = output.get("data", {})
        if "text/markdown" in data:
            data["text/markdown"] = prose(data["text/markdown"], verdicts, named)


def _cover(
    figures: Sequence[Mapping[str, str]], preferred: Iterable[str]
) -> Mapping[str, str] | None:
    """The first figure of a cell tagged `cover`, else the first figure of all."""
    for cell in preferred:
        for figure in figures:
            if figure["cell"] == cell:
                return figure
    return next(iter(figures), None)


def title_of(notebook: Any) -> str:
    """The first heading that begins a cell; empty where there is none."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return cell.source.splitlines()[0].removeprefix("# ")
    return ""


def _take_records(cell: Any) -> list[Record]:
    """Records that a cell published; its outputs show how many instead.

    A widget leaves what it displays as HTML beside it, if anything: the frames of a slider.
    """
    published, shown = [], []
    for output in cell.outputs:
        data = output.get("data", {})
        if MIME in data and not problem(data[MIME]):
            published.append(data[MIME])
        is_widget = data.pop(WIDGET, None) is not None
        if MIME not in data and (not is_widget or "text/html" in data):
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


def _lead_to_pages(body: BeautifulSoup, titles: Mapping[str, str]) -> None:
    """Let links to notebooks lead to their pages; a link to any other notebook becomes text.

    A link whose text is the file's name gets the title instead.
    """
    for link in body.find_all("a", href=NOTEBOOK_LINK):
        match = NOTEBOOK_LINK.match(str(link["href"]))
        name = match[1] if match else ""
        if name not in titles:
            link.unwrap()
            continue
        link.attrs = {"href": f"{name}.html"}
        if link.get_text().strip() in (name, f"{name}.ipynb"):
            link.string = titles[name]


def _space_percents(body: BeautifulSoup) -> None:
    """Write every per cent of prose, tables and figures' words in one form; code stays as it is."""
    for text in body.find_all(string=PERCENT):
        is_code = text.find_parent("code") or text.find_parent(class_=INPUT)
        if not is_code:
            text.replace_with(space_percents(str(text)))
    for image in body.find_all("img", alt=PERCENT):
        image["alt"] = space_percents(str(image["alt"]))


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
        elif words and not image.find_parent(hidden=True):  # of a slider's frames the first shown
            figures.append({"alt": words, "src": source, "cell": _cell_of(image)})
    return figures, defects


def _cell_of(image: Tag) -> str:
    cell = image.find_parent(id=re.compile(f"^{layout.CELL_ID}"))
    if cell is None:
        return ""
    return str(cell["id"]).removeprefix(layout.CELL_ID)
