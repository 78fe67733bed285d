"""Pictures: data in, matplotlib Axes out.

Importing it sets matplotlib's settings to its own defaults, whatever the user's matplotlibrc says:
a page looks alike everywhere. No other global style, and nothing is saved; `show` puts a picture on
a page with its alt text.
"""

import matplotlib.style

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

matplotlib.style.use("default")

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
