"""A figure as SVG whose colours follow the reader's light or dark scheme."""

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from asrkit.workbench.plots.palette import DARK, DARK_FRAME
from asrkit.workbench.tables import space_percents

MAX_VECTOR_BYTES = 120_000  # above this size, lines and points become pixels inside the SVG
RASTER_DPI = 144
MAX_EXACT = 512  # rows and columns of a heat map that keeps one pixel for each value
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "asrkit", "image.composite_image": False}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
COLOUR = re.compile(r"(?P<what>fill|stroke): (?P<colour>#[0-9a-f]{6})")
FONT_FAMILY = re.compile(r" ?font-family: [^;\"]*;?")
COORDINATES = re.compile(r'\b(?:d|x|y)="[^"]*"')
WORDS = re.compile(r"(?<=>)[^<>]+(?=</t(?:ext|span)>)")
DECIMALS = re.compile(r"(\.\d\d)\d+")


def as_svg(figure: Figure) -> str:
    """The figure as an SVG document that loads nothing and needs no style sheet.

    Text stays text. Heat maps keep one pixel for each value. In other documents of more than
    `MAX_VECTOR_BYTES`, lines and points are rasterised, but not text and axes. Pixels cannot follow
    the scheme, so in a figure with pixels the palette does not follow it either.
    """
    has_pixels = any(ax.images for ax in figure.axes)
    for image in (image for ax in figure.axes for image in ax.images):
        if max(image.get_size()) <= MAX_EXACT:
            image.set_interpolation("none")
    document = _saved(figure)
    if len(document) > MAX_VECTOR_BYTES:
        for ax in figure.axes:
            for artist in (*ax.lines, *ax.collections, *ax.patches):
                artist.set_rasterized(True)
        document = _saved(figure)
    return _with_schemes(document, DARK_FRAME if has_pixels else DARK)


def _saved(figure: Figure) -> str:
    """Matplotlib's SVG without its prolog, and with coordinates rounded to two decimals."""
    file = io.StringIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(file, format="svg", dpi=RASTER_DPI, metadata=NO_METADATA)
    text = file.getvalue()
    document = text[text.index("<svg") :]
    document = COORDINATES.sub(lambda match: DECIMALS.sub(r"\1", match[0]), document)
    document = FONT_FAMILY.sub("", document)
    document = WORDS.sub(lambda match: space_percents(match[0]), document)
    return re.sub(r"\n\s*", "\n", document)


def _with_schemes(document: str, variables: Mapping[str, tuple[str, str]]) -> str:
    """The document with CSS variables for its colours, and their values in both schemes.

    The root gets a `fill`, because matplotlib omits it where it draws in black.

    Args:
        document: Matplotlib's SVG.
        variables: Colour -> name of its variable, and its value on a dark page.
    """
    light = ";".join(f"--{name}:{colour}" for colour, (name, _) in variables.items())
    dark = ";".join(f"--{name}:{value}" for name, value in variables.values())
    style = (
        f"svg{{{light};fill:var(--ink);font-family:system-ui,sans-serif;color-scheme:light dark}}"
        "*{stroke-linejoin:round;stroke-linecap:butt}"
        f"@media screen and (prefers-color-scheme:dark){{svg{{{dark}}}}}"
    )
    document = re.sub(
        r"(?s)<style type=\"text/css\">.*?</style>", f"<style>{style}</style>", document, count=1
    )

    def variable(match: re.Match[str]) -> str:
        if match["colour"] not in variables:
            return match[0]
        name, _ = variables[match["colour"]]
        return f"{match['what']}:var(--{name})"

    return COLOUR.sub(variable, document)
