"""Half precision: what casts move, a cast against its product, and errors of features."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.measure import Timing
from asrkit.workbench.plots.palette import COLOURS, colour

LINE_THINGS = {  # line of the figure -> the thing in the palette
    "cast of input and weight": "cast",
    "cast of the input alone": "cast of input",
    "product": "matrix product",
}


def cast_bytes(
    gigabytes: Mapping[str, Sequence[float]], batches: Sequence[int], ax: Axes, *, xlabel: str
) -> Axes:
    """A bar for each batch size: casts of weights below, of activations on top.

    Args:
        gigabytes: "weight" and "activation" -> GB read and written, one for each batch size.
        batches: Utterances in the batch.
        ax: Axes to draw on; returned.
        xlabel: What the batches hold.
    """
    bottom = np.zeros(len(batches))
    for operand in ("weight", "activation"):
        name = f"cast of {operand}"
        heights = np.array(gigabytes[operand])
        ax.bar(range(len(batches)), heights, bottom=bottom, color=colour(name), label=name)
        bottom += heights
    ax.set_xticks(range(len(batches)), [str(B) for B in batches])
    ax.set(xlabel=xlabel, ylabel="GB read and written by casts")
    ax.legend(frameon=False)
    return ax


def cast_against_product(
    frames: np.ndarray, times_us: Mapping[str, Any], ax: Axes, *, published_us: float
) -> Axes:
    """Microseconds of a layer's casts and of its product over the frames, both logarithmic.

    Args:
        frames: Frames in the batch.
        times_us: Line -> microseconds, one for each number of frames.
        ax: Axes to draw on; returned.
        published_us: What was published for both: a dotted line.
    """
    for name, times in times_us.items():
        ax.plot(frames, times, color=colour(LINE_THINGS[name]), label=name)
    ax.axhline(published_us, color="black", lw=1, ls=":", label="published, for both")
    ax.set(xscale="log", yscale="log", xlabel="frames in the batch, N")
    ax.set_ylabel("µs, A100 data sheet (arithmetic)")
    ax.legend(frameon=False, fontsize=8)
    return ax


def time_bars(
    times: Mapping[str, Timing], ax: Axes, *, unit: str, things: Mapping[str, str] | None = None
) -> Axes:
    """A bar for each arm: its median time, and a line over its quartiles.

    Args:
        times: Timings by the name of the arm, the first on top.
        ax: Axes to draw on; returned.
        unit: What the times are of, with their unit.
        things: Arm -> its thing in the palette, where that has another name.
    """
    for name, timing in times.items():
        thing = name
        if things is not None:
            thing = things.get(name, name)
        low, middle, high = (timing.percentile_ms(percent) for percent in (25, 50, 75))
        spread = [[middle - low], [high - middle]]
        ax.barh(name, middle, xerr=spread, color=colour(thing), height=0.6)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    return ax


def errors_of_bins(errors: Mapping[str, Any], ax: Axes) -> Axes:
    """Mean error of each mel bin; a colour a stage, solid in bfloat16 and dotted in float16.

    Args:
        errors: "stage, format" -> error of each bin, two formats a stage.
        ax: Axes to draw on; returned.
    """
    for number, (name, values) in enumerate(errors.items()):
        line = "-"
        if name.endswith("float16") and not name.endswith("bfloat16"):
            line = ":"
        ax.plot(values, color=COLOURS[2 + number // 2], ls=line, label=name)
    ax.set(yscale="log", xlabel="mel bin, low to high", ylabel="mean error, in deviations")
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax
