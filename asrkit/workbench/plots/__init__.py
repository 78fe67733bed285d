"""Pictures: functions that draw data on matplotlib Axes.

Importing this package resets matplotlib's settings to their defaults, so that the user's
matplotlibrc changes no page. There is no other global style, and nothing is saved; `show` puts a
picture on a page with its alt text.
"""

import matplotlib.style

from asrkit.workbench.plots.canvas import as_html, canvas, show
from asrkit.workbench.plots.explore import explore
from asrkit.workbench.plots.marks import dots, intervals, lattice, stacked
from asrkit.workbench.plots.palette import COLOURS, colour

matplotlib.style.use("default")

__all__ = [
    "COLOURS",
    "as_html",
    "canvas",
    "colour",
    "dots",
    "explore",
    "intervals",
    "lattice",
    "show",
    "stacked",
]
