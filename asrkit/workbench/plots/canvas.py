"""An empty figure, and its display on a page with alt text."""

import base64
import html
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asrkit.shapes import expect
from asrkit.workbench.plots.svg import as_svg

LEGEND_BESIDE: dict[str, Any] = {  # a legend to the right of its Axes
    "frameon": False,
    "fontsize": 8,
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
}


def canvas(
    title: str, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.5, 3.2)
) -> tuple[Figure, Axes | np.ndarray]:
    """A figure and its Axes, independent of pyplot's state; several Axes come as an array.

    Args:
        title: The claim that the picture makes.
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
    """Display `figure` with its alt text; notebooks show all pictures by this function.

    The picture is SVG inside an `<img>`, which JupyterLab and the report show alike.

    Raises:
        ValueError: `alt` is not a sentence.
    """
    from IPython.display import display

    display({"text/html": as_html(figure, alt), "text/plain": alt}, raw=True)


def as_html(figure: Figure, alt: str) -> str:
    """An `<img>` with the picture inside, for example for `ipywidgets.HTML`.

    Raises:
        ValueError: `alt` is not a sentence.
    """
    expect(len(alt.split()) >= 4, "alt", "a sentence that says what the picture shows", repr(alt))
    data = base64.b64encode(as_svg(figure).encode()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'
