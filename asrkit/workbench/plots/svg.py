"""A figure as SVG whose colours follow the light or dark scheme of the reader."""

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from asrkit.workbench.plots.palette import DARK, DARK_FRAME
from asrkit.workbench.tables import space_percents

HEAVY_BYTES = 120_000  # beyond this, what is drawn with data becomes a picture inside the SVG
RASTER_DPI = 144
BLACK_ON_PIXELS = "#010101"  # unlike black, the same in both schemes
LARGEST_EXACT = 512  # rows and columns of a heat map that keeps its own pixels
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "asrkit", "image.composite_image": False}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
COLOUR = re.compile(r"(?P<what>fill|stroke): (?P<colour>#[0-9a-f]{6})")
FONT_FAMILY = re.compile(r" ?font-family: [^;\"]*;?")
COORDINATES = re.compile(r'\b(?:d|x|y)="[^"]*"')
WORDS = re.compile(r"(?<=>)[^<>]+(?=</t(?:ext|span)>)")
DECIMALS = re.compile(r"(\.\d\d)\d+")


def as_svg(figure: Figure) -> str:
    """The figure as an SVG document that loads nothing and needs no style of the page around it.

    Text stays text. Heat maps keep one pixel a value; other drawings of more than `HEAVY_BYTES`
    are rasterised, with text and axes still as vectors. Pixels cannot follow the scheme, so that
    beside them the palette does not either.
    """
    has_pixels = any(ax.images for ax in figure.axes)
    for ax in figure.axes:
        _prepare_axes(ax)
    document = _saved(figure)
    if len(document) > HEAVY_BYTES:
        for ax in figure.axes:
            for artist in (*ax.lines, *ax.collections, *ax.patches):
                artist.set_rasterized(True)
        document = _saved(figure)
    return _with_schemes(document, DARK_FRAME if has_pixels else DARK)


def _prepare_axes(ax: Axes) -> None:
    """Keep the pixels of heat maps as they are, and black words on them or on marks black.

    Where the page shows through, the words follow the scheme as it does.
    """
    for image in ax.images:
        if max(image.get_size()) <= LARGEST_EXACT:
            image.set_interpolation("none")
    marks = _centres_of_marks(ax)
    has_opaque_pixels = any(_is_opaque(image) for image in ax.images)
    for text in ax.texts:
        is_on_colour = has_opaque_pixels or text.get_position() in marks
        if is_on_colour and to_hex(text.get_color()) == "#000000":
            text.set_color(BLACK_ON_PIXELS)


def _is_opaque(image: AxesImage) -> bool:
    """Whether no colour of a heat map lets the page through."""
    colours = image.get_cmap()(np.linspace(0, 1, 256))
    return bool(colours[:, 3].min() == 1)


def _centres_of_marks(ax: Axes) -> set[tuple[float, float]]:
    """Where the opaque marks of scatter plots stand, in the coordinates of the data."""
    centres = set[tuple[float, float]]()
    for marks in ax.collections:
        if not isinstance(marks, PathCollection):
            continue
        faces = np.asarray(marks.get_facecolor()).reshape(-1, 4)
        if len(faces) and faces[:, 3].min() == 1:
            for x, y in np.asarray(marks.get_offsets()).tolist():
                centres.add((x, y))
    return centres


def _saved(figure: Figure) -> str:
    """What matplotlib writes, without its prolog and with coordinates of two decimals."""
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
    """The document with variables for colours, and their values in both schemes.

    What matplotlib draws in black has no `fill` at all, so the root has one.

    Args:
        document: SVG of matplotlib.
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
