"""Number formats: how finely they resolve a magnitude, and which magnitudes occur."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes

from asrkit.workbench.plots.palette import GREY, colour

POWERS = np.arange(-100, 40)


def format_steps(formats: Mapping[str, torch.dtype], ax: Axes) -> Axes:
    """Distance from a number to the next larger one, relative to the number, over its magnitude.

    Args:
        formats: Names known to the palette -> dtypes.
        ax: Axes to draw on; returned.
    """
    numbers = 2.0**POWERS
    for name, dtype in formats.items():
        info = torch.finfo(dtype)
        steps = info.eps * np.maximum(numbers, info.tiny) / numbers
        steps[numbers > info.max] = np.nan
        ax.plot(numbers, steps, color=colour(name), label=name)
    ax.set(xscale="log", yscale="log", ylabel="next step, relative", ylim=(1e-8, 2))
    ax.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")
    return ax


def magnitudes(
    spans: Mapping[str, Sequence[float]], ax: Axes, *, edges: Sequence[float] = ()
) -> Axes:
    """A line for each quantity, from the smallest to the largest magnitude that occurs.

    Args:
        spans: Quantity -> its two ends.
        ax: Axes to draw on; returned.
        edges: Ends of a format's range, dashed.
    """
    for row, (low, high) in enumerate(spans.values()):
        ax.plot([low, high], [row, row], color=GREY, lw=8, solid_capstyle="butt")
    for edge in edges:
        ax.axvline(edge, color=colour("float16"), ls="--", lw=1)
    ax.set_yticks(range(len(spans)), list(spans))
    ax.set(xscale="log", xlabel="magnitude", ylim=(-0.6, len(spans) - 0.4))
    return ax
