"""Notebook 10: a picture of a batch that runs in phases."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import colour


def phased_batch(seconds: np.ndarray, phases: Sequence[tuple[float, int]], ax: Axes) -> None:
    """Draw utterances as bars, the longest first, over the cells that each phase computes.

    Args:
        seconds: Length of each utterance (B,), in any order.
        phases: (end in seconds, rows) of each phase.
        ax: Axes to draw on.
    """
    start = 0.0
    shades = cycle((0.45, 0.25))  # phases alternate, so that they can be distinguished
    for end, rows in phases:
        label = "" if start else "padding"  # in the legend once
        shade: dict[str, Any] = {"color": colour("padding"), "alpha": next(shades), "label": label}
        ax.bar(0, end - start, width=rows, bottom=start, align="edge", lw=0, **shade)
        start = end
    longest_first = np.sort(seconds)[::-1]
    places = np.arange(len(seconds))
    ax.bar(places, longest_first, 1.0, align="edge", color=colour("useful"), lw=0, label="useful")
    ax.set(xlabel="utterances, the longest first", ylabel="length, s", xlim=(0, len(seconds)))
    ax.legend(**LEGEND_BESIDE)
