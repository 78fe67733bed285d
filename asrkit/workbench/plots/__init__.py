"""Pictures: data in, matplotlib Axes out.

No global style, and nothing is saved; `show` puts a picture on a page with its alt text.
"""

from asrkit.workbench.plots.canvas import as_html, canvas, show
from asrkit.workbench.plots.frames import frames
from asrkit.workbench.plots.marks import (
    dots,
    intervals,
    lattice,
    stacked,
    timeline,
)
from asrkit.workbench.plots.palette import COLOURS, colour

__all__ = [
    "COLOURS",
    "as_html",
    "canvas",
    "colour",
    "dots",
    "frames",
    "intervals",
    "lattice",
    "show",
    "stacked",
    "timeline",
]
