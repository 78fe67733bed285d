"""Pictures: data in, matplotlib Axes out.

No global style, and nothing is saved; `show` puts a picture on a page with its alt text.
"""

from asrkit.workbench.plots.bars import stacked, timeline, waterfall
from asrkit.workbench.plots.canvas import as_html, canvas, show
from asrkit.workbench.plots.dots import dots
from asrkit.workbench.plots.frames import frames
from asrkit.workbench.plots.intervals import intervals
from asrkit.workbench.plots.palette import COLOURS, colour
from asrkit.workbench.plots.speech import (
    lattice,
    lengths,
    spectrogram,
    training_curve,
    waveform,
)

__all__ = [
    "COLOURS",
    "as_html",
    "canvas",
    "colour",
    "dots",
    "frames",
    "intervals",
    "lattice",
    "lengths",
    "show",
    "spectrogram",
    "stacked",
    "timeline",
    "training_curve",
    "waterfall",
    "waveform",
]
