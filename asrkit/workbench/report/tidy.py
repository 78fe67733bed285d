"""HTML of a notebook made fit for a page of the report."""

import re
from collections.abc import Collection

from bs4 import BeautifulSoup, Tag

PICTURE = "scroll picture"  # class of the box around a figure
OWN_IDS = ("claim-", "cell-id=")  # those that asrkit gives; links to them lead where they say
PAGE_IDS = (*OWN_IDS, "records")  # ids of the page around the notebook that it may link to


def tidy(html: str) -> BeautifulSoup:
    """A notebook's HTML, whose page has one style and one script of its own.

    Headings come in order under one h1; tables have scopes; tables and figures stand in boxes that
    scroll; each id stands once and is none of those of the page around it.
    """
    page = BeautifulSoup(html, "html.parser", multi_valued_attributes=None)
    for tag in page.find_all(["script", "style"]) + page.find_all("a", class_="anchor-link"):
        tag.decompose()
    _align_by_attribute(page)
    for table in page.find_all("table"):
        _label_headers(table)
        table.wrap(page.new_tag("div", attrs={"class": "scroll"}))
    _order_headings(page)
    _separate_ids(page)
    _box_figures(page)
    return page


def _align_by_attribute(page: BeautifulSoup) -> None:
    """Replace styles, which the policy blocks, by an attribute that the page's style knows."""
    for tag in page.find_all(style=True):
        alignment = re.search(r"text-align:\s*(right|center)", str(tag["style"]))
        del tag["style"]
        if alignment:
            tag["data-align"] = alignment[1]


def _label_headers(table: Tag) -> None:
    """Say of each header cell whether it is of a column or of a row; empty ones are no headers."""
    for cell in table.find_all("th"):
        if cell.get_text(strip=True) or cell.find(True):
            cell["scope"] = "col" if cell.find_parent("thead") else "row"
        else:
            cell.name = "td"
            cell.attrs.clear()
            cell.clear()


def _order_headings(page: BeautifulSoup) -> None:
    """One h1, at the top, and no level left out on the way down."""
    level = 0
    for heading in page.find_all(re.compile("^h[1-6]$")):
        highest = 1 if level == 0 else 2
        level = min(max(int(heading.name[1]), highest), level + 1)
        heading.name = f"h{level}"


def _separate_ids(page: BeautifulSoup) -> None:
    """Keep the first of equal ids, and give those of the notebook a prefix, as in links to them."""
    seen = set[str]()
    for tag in page.find_all(id=True):
        name = str(tag["id"])
        if name in seen:
            del tag["id"]
        else:
            tag["id"] = _prefixed(name, OWN_IDS)
        seen.add(name)
    for link in page.find_all("a", href=re.compile("^#")):
        target = str(link["href"])[1:]
        link["href"] = f"#{_prefixed(target, PAGE_IDS)}"


def _prefixed(name: str, unchanged: Collection[str]) -> str:
    if name.startswith(tuple(unchanged)):
        return name
    return f"nb-{name}"


def _box_figures(page: BeautifulSoup) -> None:
    """Put each figure into a box in which it can scroll; the frames of a slider into one box."""
    for slider in page.find_all(class_="frames"):
        box = page.new_tag("div", attrs={"class": PICTURE})
        for child in list(slider.children):
            box.append(child)
        slider.append(box)
    for image in page.find_all("img", src=re.compile("^data:image/svg")):
        if image.find_parent("div", class_=PICTURE) is None:
            image.wrap(page.new_tag("div", attrs={"class": PICTURE}))
