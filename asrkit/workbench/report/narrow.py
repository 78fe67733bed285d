"""What lets the tables and figures of a notebook be read on a narrow screen.

A table with sentences in it becomes a block for each row there: every cell carries the name of its
column, which the style shows before it. Any other table scrolls beside its first column, and so
does a figure, whose words would be too small if it shrank to the screen.
"""

import re
from collections.abc import Sequence

from bs4 import BeautifulSoup, Tag

SENTENCE = 40  # a cell of more letters does not fit into a column of a phone
FEWEST_COLUMNS = 3
NOTHING = ("", "–")  # what a cell says that says nothing
ABSENT = "none"  # class of such a cell, which a block leaves out
STACKED = "stacked"  # class of a table whose rows become blocks
PICTURE = "scroll picture"  # class of the box around a figure
# A display other than a table's takes these from the elements, so that they are named.
ROLES = {"table": "table", "thead": "rowgroup", "tbody": "rowgroup", "tr": "row", "td": "cell"}


def label_cells(body: BeautifulSoup) -> None:
    """Give the cells of every table that has sentences the names of their columns.

    Args:
        body: A page with plain tables; cells get `data-label`.
    """
    for table in body.find_all("table"):
        names = _column_names(table)
        rows = [_cells(row) for part in table.find_all("tbody") for row in part.find_all("tr")]
        if len(names) < FEWEST_COLUMNS or not _has_sentences(rows):
            continue
        if any(len(cells) != len(names) for cells in rows):  # cells that span several
            continue
        table["class"] = f"{table.get('class', '')} {STACKED}".strip()
        for cells in rows:
            for name, cell in zip(names, cells, strict=True):
                cell["data-label"] = name
                if cell.get_text(strip=True) in NOTHING:
                    cell["class"] = f"{cell.get('class', '')} {ABSENT}".strip()
        _name_roles(table)


def _column_names(table: Tag) -> list[str]:
    """The name of each column; empty where no row of the head names one column a cell.

    pandas writes the names of columns and of the index in two rows, each with empty cells.
    """
    head = table.find("thead")
    if not isinstance(head, Tag):
        return []
    rows = [_cells(row) for row in head.find_all("tr")]
    if not rows or any(len(cells) != len(rows[0]) for cells in rows):
        return []
    names = []
    for column in zip(*rows, strict=True):
        if any(cell.has_attr("colspan") for cell in column):
            return []
        names.append(" ".join(cell.get_text(" ", strip=True) for cell in column).strip())
    return names


def _cells(row: Tag) -> Sequence[Tag]:
    return row.find_all(["th", "td"])


def _has_sentences(rows: Sequence[Sequence[Tag]]) -> bool:
    return any(len(cell.get_text(strip=True)) > SENTENCE for cells in rows for cell in cells)


def _name_roles(table: Tag) -> None:
    table["role"] = "table"
    for part in table.find_all(list(ROLES)):
        part["role"] = ROLES[part.name]
    for header in table.find_all("th"):
        header["role"] = "rowheader" if header.get("scope") == "row" else "columnheader"


def box_figures(body: BeautifulSoup) -> None:
    """Put each figure into a box in which it can scroll; the frames of a slider into one box.

    Args:
        body: A page; figures are its images of SVG.
    """
    for slider in body.find_all(class_="frames"):
        box = body.new_tag("div", attrs={"class": PICTURE})
        for child in list(slider.children):
            box.append(child)
        slider.append(box)
    for image in body.find_all("img", src=re.compile("^data:image/svg")):
        if image.find_parent("div", class_=PICTURE) is None:
            image.wrap(body.new_tag("div", attrs={"class": PICTURE}))
