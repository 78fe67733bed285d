"""An empty picture, and how it gets onto a page with its alt text."""

import base64
import html
import io
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asrkit.shapes import expect

# One colour an implementation, in this order.
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
BLUE, RED, GREEN, BROWN, _, GREY = COLOURS
LEGEND_BESIDE: dict[str, Any] = {  # a legend to the right of its Axes
    "frameon": False,
    "fontsize": 8,
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
}


def canvas(
    title: str, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.5, 3.2)
) -> tuple[Figure, Axes | np.ndarray]:
    """A figure and its Axes, detached from pyplot's state; several Axes come as an array.

    Args:
        title: The one claim that the picture makes.
        rows: Rows of Axes.
        columns: Columns of Axes.
        size: Width and height in inches.
    """
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure, axes


def show(figure: Figure, alt: str) -> None:
    """Display `figure` with its alt text: the only way notebooks show pictures.

    JupyterLab takes the alt text from the HTML only.

    Raises:
        ValueError: `alt` is no sentence.
    """
    from IPython.display import display

    png = _png(figure, alt)
    data = {"text/html": _image(png, alt), "image/png": png, "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})


def as_html(figure: Figure, alt: str) -> str:
    """`<img>` with the picture inside, for `ipywidgets.HTML`, into which widgets draw.

    Raises:
        ValueError: `alt` is no sentence.
    """
    return _image(_png(figure, alt), alt)


def _png(figure: Figure, alt: str) -> str:
    """The picture as base64 of a PNG."""
    expect(len(alt.split()) >= 4, "alt", "a sentence that says what the picture shows", repr(alt))
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return base64.b64encode(file.getvalue()).decode()


def _image(png: str, alt: str) -> str:
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}">'
