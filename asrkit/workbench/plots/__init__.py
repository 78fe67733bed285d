"""Pictures: data in, matplotlib Axes out.

No global style, and nothing is saved; `show` puts a picture on a page with its alt text.
"""

from asrkit.workbench.plots.bars import padded_batches, stacked, timeline, tornado
from asrkit.workbench.plots.canvas import as_html, canvas, show
from asrkit.workbench.plots.costs import break_even, cost_bars
from asrkit.workbench.plots.decoding import (
    pointer_jumping,
    waiting,
    waiting_legend,
    waits_matrix,
)
from asrkit.workbench.plots.dots import dots
from asrkit.workbench.plots.formats import format_steps, magnitudes
from asrkit.workbench.plots.frames import frames
from asrkit.workbench.plots.intervals import intervals
from asrkit.workbench.plots.lattices import arcs, diagonal, nodes_at_once, tdt_arcs
from asrkit.workbench.plots.lean_tile import lean_tile
from asrkit.workbench.plots.memory import memory_over_batch, padded_lattices
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
    "arcs",
    "as_html",
    "break_even",
    "canvas",
    "colour",
    "cost_bars",
    "diagonal",
    "dots",
    "format_steps",
    "frames",
    "intervals",
    "lattice",
    "lean_tile",
    "lengths",
    "magnitudes",
    "memory_over_batch",
    "nodes_at_once",
    "padded_batches",
    "padded_lattices",
    "pointer_jumping",
    "show",
    "spectrogram",
    "stacked",
    "tdt_arcs",
    "timeline",
    "tornado",
    "training_curve",
    "waiting",
    "waiting_legend",
    "waits_matrix",
    "waveform",
]
