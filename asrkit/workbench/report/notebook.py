"""One executed notebook as HTML, by nbconvert with templates/cells.html.j2.

The tags of cells order the page. `hide-input` folds the code of a cell. A `takeaway` cell displays
Markdown, a list of what this run shows; it moves to the top of the page, and its first line is the
answer on the index. The first figure of the `cover` cell is the notebook's picture on the index.
Imports and parameters are folded, and move to the end of the page with their output.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from bs4 import BeautifulSoup, Comment
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from nbformat.v4 import new_markdown_cell
from traitlets.config import Config

from asrkit.workbench.claims import LEGEND
from asrkit.workbench.records import MIME, Record, problem

TEMPLATES = Path(__file__).parent / "templates"
WIDGET = "application/vnd.jupyter.widget-view+json"
# By priority. A slider's output has its frames as HTML; other widgets need a kernel and are hidden.
SHOWN = ["text/html", "text/markdown", "image/svg+xml", "image/png", WIDGET, MIME, "text/plain"]
DEFAULT_ALT = "No description has been provided for this image"  # nbconvert's, for want of one
WORDS_PER_MINUTE = 200
# HTML tags that are removed from outputs, because they affect the whole page or load something.
REMOVED_TAGS = "style script meta link iframe object embed base".split()
FOLDED_TAGS = {"hide-input", "takeaway"}
SET_UP = ("Imports", "Parameters", "Check")  # titles of the folded code that moves to the end
MARK = "a.claim, td .mark"
GLOSSARY = "glossary"  # name of the page of terms, and of the Markdown file beside the notebooks
LEGEND_COMMENT = "legend"  # a page replaces this comment by the legend of its marks
SUPERSCRIPT = str.maketrans("0123456789+-−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻")
CELL = re.compile("^cell-id=")
QUESTION = re.compile(r"\*\*Question \d+( \(predict\))?\.\*\*")
WHITE_SPACE = re.compile(r"[^\S\u00a0]+")  # except the no-break space before a unit
# Code comes first, so that dollars and comments inside it are ignored.
PATTERN = re.compile(
    r"(?s)(?P<code>(?P<fence>```|~~~).*?(?P=fence)|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|<!--\s*(?P<claim>[\w.-]+?)\s*-->|(?P<comment><!--.*?-->)"
    r"|\[(?P<text>[^\]]*)\]\((?P<page>[\w.-]+)\.(?:ipynb|md)(?P<anchor>#[^)]*)?\)"
    r"|(?P<percent>(?<=\d) %)"
    r"|(?<!\\)\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<line>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)"
)
MARKS = {  # verdict -> mark; any other is "soft"
    "reproduced": "good",
    "arithmetic checked": "good",
    "direction only": "mild",
    "not reproduced": "bad",
}
SIGNS = {"good": "✓", "mild": "≈", "bad": "✗", "soft": "○"}


def mark_of(label: str) -> str:
    """The style of a verdict's mark: "good", "mild", "bad" or "soft"."""
    return MARKS.get(label, "soft")


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a notebook's page.

    Attributes:
        title: Title of the notebook.
        body: The cells as HTML.
        takeaway: The takeaway as HTML.
        answer: First line of the takeaway, as text.
        minutes: Time to read the prose.
        questions: Number of questions that the notebook asks.
        predicts: Whether one of them asks for a prediction, which the takeaway answers.
        headings: (id, text) of each section.
        figures: alt, src and the id of the cell of each picture.
        cover: The figure that the index shows.
        records: Records by cell id.
        claims: Ids of the claims that the prose names.
        has_marks: Whether the page has a mark of a claim or a verdict.
        defects: Problems of the page.
    """

    title: str
    body: str = ""
    takeaway: str = ""
    answer: str = ""
    minutes: int = 1
    questions: int = 0
    predicts: bool = False
    headings: Sequence[tuple[str, str]] = ()
    figures: Sequence[Mapping[str, str]] = ()
    cover: Mapping[str, str] | None = None
    records: Mapping[str, Sequence[Record]]
    claims: Sequence[str] = ()
    has_marks: bool = False
    defects: Sequence[str] = ()


def _title(notebook: Any) -> str:
    """The first heading that begins a cell; empty if there is none."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return str(cell.source.splitlines()[0].removeprefix("# "))
    return ""


def render(executed: Path, verdicts: Mapping[str, str], names: Sequence[str] = ()) -> Page:
    """The page of an executed notebook.

    Args:
        executed: The notebook with its outputs.
        verdicts: Claim id -> label. A comment `<!-- claim-id -->` in the prose becomes a mark that
            links to that claim.
        names: The notebooks of the report, and the glossary. Links to other files become text.
    """
    notebook = nbformat.read(executed, 4)
    title, prose = _title(notebook), Prose(verdicts, names)
    takeaways, covers = list[str](), list[str]()
    asked = list[str]()  # for each question, its mark of a prediction or ""
    words = 0
    records = dict[str, list[Record]]()
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            words += len(cell.source.split())
            asked += QUESTION.findall(cell.source)
            cell.source = prose(cell.source.removeprefix(f"# {title}"))
        elif cell.cell_type == "code":
            bundles = [output.get("data", {}) for output in cell.outputs]
            displayed = [bundle[MIME] for bundle in bundles if MIME in bundle]
            prose.defects += filter(None, map(problem, displayed))
            published = [record for record in displayed if not problem(record)]
            if published:
                records[cell.id] = published
            cell.metadata.published = len(published)
            cell.metadata.fold = _fold(cell, tags)
            markdown = [bundle for bundle in bundles if "text/markdown" in bundle]
            for bundle in markdown:
                bundle["text/markdown"] = prose(bundle["text/markdown"])
            if "takeaway" in tags:
                takeaways += [bundle["text/markdown"] for bundle in markdown]
                cell.outputs = [
                    output for output in cell.outputs if output.get("data") not in markdown
                ]
        if "cover" in tags:
            covers.append(cell.id)
    _move_set_up(notebook)
    body = BeautifulSoup(_exporter().from_notebook_node(notebook)[0], "html.parser")
    above = BeautifulSoup(markdown2html("\n".join(takeaways)), "html.parser")
    _finish(body)
    _finish(above)
    first_mark = above.select_one(MARK) or body.select_one(MARK)
    cell = first_mark and first_mark.find_parent(id=CELL)  # None if it is in the takeaway
    if cell:
        cell.insert_before(Comment(LEGEND_COMMENT))
    figures, defects = _figures(body)
    defects += _figures(above)[1]
    preferred = [figure for figure in figures if figure["cell"] in covers]
    return Page(
        title=title or executed.stem,
        body=str(body),
        takeaway=str(above),
        answer=first_line(str(above)),
        minutes=max(1, round(words / WORDS_PER_MINUTE)),
        questions=len(asked),
        predicts=any(asked),
        headings=[(str(heading["id"]), heading.get_text()) for heading in body.find_all("h2")],
        figures=figures,
        cover=next(iter([*preferred, *figures]), None),
        records=records,
        claims=prose.claims,
        has_marks=bool(first_mark),
        defects=[*prose.defects, *defects],
    )


def _move_set_up(notebook: Any) -> None:
    """Move imports and parameters after the other cells, under a heading."""
    set_up = [cell for cell in notebook.cells if cell.metadata.get("fold", "").startswith(SET_UP)]
    if set_up:
        rest = [cell for cell in notebook.cells if cell not in set_up]
        heading = new_markdown_cell("## How this page was run", id="set-up")
        notebook.cells = [*rest, heading, *set_up]


def _fold(cell: Any, tags: Sequence[str]) -> str:
    """The title of folded code; empty if the code is shown."""
    name = "Code"
    if "parameters" in tags:
        name = "Parameters"
    elif "injected-parameters" in tags:
        name = "Parameters of this run"
    elif cell.source.startswith("expect_parameters("):
        name = "Check of the parameters"
    elif cell.source.endswith("print(machine.stamp())"):
        name = "Imports"
    elif FOLDED_TAGS.isdisjoint(tags):
        return ""
    lines = len(cell.source.splitlines())
    return f"{name}, {lines} line{'s' if lines > 1 else ''}"


def _exporter() -> HTMLExporter:
    return HTMLExporter(
        template_file="cells.html.j2",
        extra_loaders=[jinja2.FileSystemLoader(TEMPLATES)],
        exclude_anchor_links=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        config=Config({"NbConvertBase": {"display_data_priority": SHOWN}}),
    )


def glossary_html(path: Path) -> str:
    """The terms of a glossary as HTML, each heading with the anchor that code hosts give it."""
    _, mark, terms = path.read_text("utf-8").partition("### ")  # the template has the title
    body = BeautifulSoup(markdown2html(mark + terms), "html.parser")
    for heading in body.find_all("h3"):
        for link in heading.find_all("a"):  # nbconvert's link to the heading itself
            link.decompose()
        heading.name = "h2"
        heading["id"] = heading.get_text().lower().replace(" ", "-")
    return str(body)


class Prose:
    """Converts Markdown: formulas become MathML, and comments that name claims become marks.

    Browsers draw MathML without a script. Prices like $5 stay text, code is not changed, and other
    comments are removed. `claims` collects the named claims, `defects` what cannot be shown.
    """

    def __init__(self, verdicts: Mapping[str, str], names: Sequence[str] = ()) -> None:
        self.verdicts = verdicts
        self.names = names
        self.claims = list[str]()
        self.defects = list[str]()

    def __call__(self, markdown: str) -> str:
        """The converted Markdown of a cell, or of an output."""
        return PATTERN.sub(self._replacement, markdown)

    def _replacement(self, match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        if match["comment"]:
            return ""
        if match["percent"]:
            return "\u00a0%"
        if match["claim"]:
            return self._mark(match["claim"])
        if match["page"]:
            anchor = match["anchor"] if match["page"] == GLOSSARY else ""
            link = f"[{match['text']}]({match['page']}.html{anchor or ''})"
            return link if match["page"] in self.names else match["text"]
        return self._formula(match)

    def _mark(self, name: str) -> str:
        """A small mark that links to the claim, with the verdict as its accessible name."""
        if name not in self.verdicts:
            self.defects.append(f"no claim: {name}")
            return ""
        anchor = "" if name in self.claims else f' id="claim-{name}"'
        self.claims.append(name)
        label = self.verdicts[name]
        title = f"Claim {name}: {label}"
        return (
            f'<a class="claim {mark_of(label)}" href="claims.html#{name}"{anchor} '
            f'title="{title}" aria-label="{title}">{SIGNS[mark_of(label)]}</a>'
        )

    def _formula(self, match: re.Match[str]) -> str:
        try:
            if match["block"]:
                return convert(match["block"].strip(), display="block")
            return convert(match["line"].strip(), display="inline")
        except Exception:  # latex2mathml's errors have no common base class
            self.defects.append(f"no LaTeX: {match[0]}")
            return f"<code>{escape(match[0])}</code>"


def first_line(takeaway: str) -> str:
    """The first line of a takeaway as text: the answer of this run in one sentence."""
    first = BeautifulSoup(takeaway, "html.parser").find(["li", "p"])
    if first is None:
        return ""
    for power in first.find_all(["sup", "msup"]):
        exponent = power if power.name == "sup" else power.find_all(recursive=False)[-1]
        exponent.replace_with(exponent.get_text().translate(SUPERSCRIPT))
    return WHITE_SPACE.sub(" ", first.get_text()).strip()


def _finish(body: BeautifulSoup) -> None:
    """Put tables and figures into boxes that scroll, mark verdicts, and remove active content."""
    for tag in body.find_all(REMOVED_TAGS):
        tag.decompose()
    for tag in body.find_all(True):
        for handler in [name for name in tag.attrs if name.startswith("on")]:
            del tag[handler]
    for number, heading in enumerate(body.find_all("h2"), 1):
        heading["id"] = f"section-{number}"
    for table in body.find_all("table"):
        table.wrap(body.new_tag("div", attrs={"class": "scroll"}))
    for image in body.find_all("img", src=re.compile("^data:image/svg")):
        image.wrap(body.new_tag("div", attrs={"class": "scroll picture"}))
    for cell in body.find_all("td"):
        label = cell.get_text(strip=True)
        if label not in LEGEND:
            continue
        attributes = {"class": f"mark {mark_of(label)}", "title": LEGEND[label]}
        cell.clear()
        cell.append(body.new_tag("span", attrs=attributes, string=label))


def _figures(body: BeautifulSoup) -> tuple[list[Mapping[str, str]], list[str]]:
    """The pictures that have alt text and are inside the page, and the defects of the others."""
    figures = list[Mapping[str, str]]()
    defects = list[str]()
    for image in body.find_all("img"):
        alt = str(image.get("alt", "")).replace(DEFAULT_ALT, "").strip()
        source = str(image.get("src", ""))
        if not alt:
            defects.append("a picture has no alt text")
        elif not source.startswith("data:"):
            defects.append("a picture is not inside the page")
        elif not image.find_parent(hidden=True):  # hidden are all but one of a slider's frames
            cell = image.find_parent(id=CELL)
            name = str(cell["id"]).removeprefix("cell-id=") if cell else ""
            figures.append({"alt": alt, "src": source, "cell": name})
    return figures, defects
