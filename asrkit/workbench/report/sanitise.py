"""HTML of a notebook made safe for a page whose policy allows no style and no script of its own."""

import re
from collections.abc import Collection

import nh3
from bs4 import BeautifulSoup, Tag

FLOW = (
    "a abbr b blockquote br caption center cite code col colgroup dd del details div dl dt em h1 "
    "h2 h3 h4 h5 h6 hr i img ins kbd li mark ol p pre q s samp small span strong sub summary sup "
    "table tbody td tfoot th thead tr tt u ul var audio source video"
)
MATHML = (
    "annotation maction math menclose merror mfrac mi mmultiscripts mn mo mover mpadded mphantom "
    "mprescripts mroot mrow ms mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder "
    "munderover semantics"
)
SVG = "svg g path rect circle ellipse line polyline polygon text tspan"
MATHML_ATTRIBUTES = (
    "accent accentunder columnalign columnlines columnspacing depth display displaystyle fence "
    "form height linethickness lspace mathvariant maxsize minsize movablelimits notation rowlines "
    "rowspacing rspace scriptlevel separator stretchy symmetric voffset width xmlns"
)
SVG_ATTRIBUTES = (
    "cx cy d dx dy fill font-size height opacity points r rx ry stroke stroke-width text-anchor "
    "transform viewBox width x x1 x2 xmlns y y1 y2"
)
CELL = {"colspan", "rowspan", "scope", "headers"}
MEDIA = {"src", "type", "controls", "preload", "width", "height"}
ATTRIBUTES = {
    **{tag: set(MATHML_ATTRIBUTES.split()) for tag in MATHML.split()},
    **{tag: set(SVG_ATTRIBUTES.split()) for tag in SVG.split()},
    **dict.fromkeys(("audio", "video", "source"), MEDIA),
    **dict.fromkeys(("td", "th"), CELL),
    "a": {"href", "aria-label"},
    "img": {"src", "alt", "width", "height"},
    "ol": {"start"},
    "details": {"open"},
    "*": {"class", "id", "title", "lang", "dir", "style", "hidden"},
}
OWN_IDS = ("claim-", "cell-id=")  # those that asrkit gives; links to them lead where they say
PAGE_IDS = (*OWN_IDS, "records")  # ids of the page around the notebook that it may link to


def clean(body: str) -> BeautifulSoup:
    """The HTML of a notebook without anything that runs, styles or leads elsewhere by itself.

    Headings come in order under one h1; tables have scopes and stand in boxes that scroll; each id
    stands once and is none of those of the page around it.
    """
    sanitised = nh3.clean(
        body,
        tags={*FLOW.split(), *MATHML.split(), *SVG.split()},
        clean_content_tags={"script", "style"},
        attributes=ATTRIBUTES,
        attribute_filter=_without_data_links,
        generic_attribute_prefixes={"data-"},
        url_schemes={"http", "https", "mailto", "data"},
        filter_style_properties={"text-align"},
        link_rel=None,
    )
    page = BeautifulSoup(sanitised, "html.parser", multi_valued_attributes=None)
    for anchor in page.find_all("a", class_="anchor-link"):
        anchor.decompose()
    _align_by_attribute(page)
    for table in page.find_all("table"):
        _label_headers(table)
        table.wrap(page.new_tag("div", attrs={"class": "scroll"}))
    _order_headings(page)
    _separate_ids(page)
    return page


def _without_data_links(tag: str, attribute: str, value: str) -> str | None:
    """Data URLs hold pictures and sounds; as a link's target one could hold a page."""
    if tag != "a" or attribute != "href":
        return value
    # browsers drop control characters, so that a tab inside "data:" hides it from a search
    visible = "".join(character for character in value if character > " ")
    return None if visible.lower().startswith("data:") else value


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
