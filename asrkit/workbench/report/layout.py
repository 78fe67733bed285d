"""Order on a notebook's page: code folded, takeaways first, headings listed.

A notebook's author says what is what by tags of cells:

`hide-input`: code that a reader of the page need not see, as plots, widgets and publishing. It is
folded; so are cells tagged `parameters`, `static-twin` or `takeaway`, cells that check parameters,
and cells that only import and print the machine's stamp.

`takeaway`: the cell prints Markdown, a list of what this run shows. Its output moves to the top of
the page, and its first line is the answer on the index.

`cover`: the first figure of this cell is the notebook's picture on the index.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bs4 import BeautifulSoup, Tag

HIDDEN = "hide-input"
TAKEAWAY = "takeaway"
COVER = "cover"
FOLDED_TAGS = {HIDDEN, TAKEAWAY, "parameters", "injected-parameters", "static-twin"}
STAMPS = ("print(machine.stamp", "machine.stamp", "machine_stamp")
WORDS_PER_MINUTE = 200
CELL_ID = "cell-id="
SUPERSCRIPT = str.maketrans("0123456789+-−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻")
MARKDOWN_OUTPUT = re.compile(r"\boutput_markdown\b")
WHITE = re.compile(r"[^\S\u00a0]+")  # white space, but for the no-break space before a unit


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A heading of a page: what a table of contents lists."""

    id: str
    text: str


def tags(cell: Any) -> Sequence[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def fold_code(body: BeautifulSoup, cells: Sequence[Any]) -> None:
    """Put the code of cells that nobody has to read behind a line that unfolds it."""
    for cell in cells:
        if cell.cell_type != "code" or not _is_folded(cell):
            continue
        place = body.find(id=f"{CELL_ID}{cell.id}")
        code = place.find(class_="input") if place else None
        if isinstance(code, Tag):
            fold = code.wrap(body.new_tag("details", attrs={"class": "code"}))
            fold.insert(0, body.new_tag("summary", string=_summary(cell)))


def _is_folded(cell: Any) -> bool:
    return not FOLDED_TAGS.isdisjoint(tags(cell)) or _is_setup(cell.source)


def _is_setup(source: str) -> bool:
    """Whether code checks parameters, or only imports and prints the machine's stamp."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return False
    if source.startswith("expect_parameters("):
        return True
    for statement in statements:
        is_stamp = ast.unparse(statement).startswith(STAMPS)
        if not isinstance(statement, ast.Import | ast.ImportFrom) and not is_stamp:
            return False
    return bool(statements)


def _summary(cell: Any) -> str:
    name = "Code"
    if "parameters" in tags(cell):
        name = "Parameters"
    elif cell.source.startswith("expect_parameters("):
        name = "Check of the parameters"
    elif "injected-parameters" in tags(cell):
        name = "Parameters of this run"
    elif cell.source.startswith(("import ", "from ")):
        name = "Imports"
    lines = len(cell.source.splitlines())
    if lines == 1:
        return f"{name}, 1 line"
    return f"{name}, {lines} lines"


def lift_takeaways(body: BeautifulSoup, cells: Sequence[Any]) -> str:
    """Take the outputs of cells tagged `takeaway` out of the page; returns them as HTML."""
    lifted = list[str]()
    for cell in cells:
        place = body.find(id=f"{CELL_ID}{cell.id}")
        if TAKEAWAY not in tags(cell) or not isinstance(place, Tag):
            continue
        for area in place.find_all(class_=MARKDOWN_OUTPUT):
            lifted.append(area.decode_contents().strip())
            area.decompose()
    return "\n".join(lifted)


def first_sentence(takeaway: str) -> str:
    """The first line of a takeaway, as text: the answer of this run in one sentence."""
    html = BeautifulSoup(takeaway, "html.parser")
    first = html.find(["li", "p"])
    if first is None:
        return ""
    for power in first.find_all(["sup", "msup"]):
        exponent = power if power.name == "sup" else power.find_all(recursive=False)[-1]
        exponent.replace_with(exponent.get_text().translate(SUPERSCRIPT))
    return WHITE.sub(" ", first.get_text()).strip()


def take_title(body: BeautifulSoup) -> str:
    """Take the heading of the first level out of the page; returns its HTML, or nothing."""
    title = body.find("h1")
    if title is None:
        return ""
    title.extract()
    return title.decode_contents().strip()


def headings(body: BeautifulSoup) -> list[Heading]:
    """The headings of the second level; each gets an id where it has none."""
    found = []
    for number, heading in enumerate(body.find_all("h2"), 1):
        if not heading.get("id"):
            heading["id"] = f"nb-section-{number}"
        found.append(Heading(id=str(heading["id"]), text=heading.get_text().strip()))
    return found


def reading_minutes(cells: Sequence[Any]) -> int:
    """Minutes that the prose of a notebook takes, at 200 words a minute; at least one."""
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    return max(1, round(words / WORDS_PER_MINUTE))


def cover_cells(cells: Sequence[Any]) -> Iterator[str]:
    """Ids of the cells whose figure may stand for the notebook, the best first."""
    for cell in cells:
        if COVER in tags(cell):
            yield cell.id
