"""Bars: made of parts, along a timeline, of batches, and of what an input changes."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from asrkit.shapes import expect
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import BLUE, COLOURS, RED, THINGS


def _shades(colour_map: str) -> Sequence[tuple[float, ...]]:
    return plt.get_cmap(colour_map).colors  # type: ignore[attr-defined]


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    ax: Axes,
    *,
    measured: Mapping[str, float] | None = None,
    unit: str = "",
) -> Axes:
    """A horizontal bar a row, made of its named parts; measured totals as diamonds.

    Args:
        rows: Name of a row -> name of a part -> its size. Parts of one name have one colour, which
            is the palette's where it knows the name.
        ax: Axes to draw on; returned.
        measured: Measured totals of some rows, by name.
        unit: Unit of all sizes.
    """
    names = dict.fromkeys(
        name for parts in rows.values() for name, part_size in parts.items() if part_size
    )
    left = np.zeros(len(rows))
    for name, shade in zip(names, _shades("tab20"), strict=False):
        widths = np.array([parts.get(name, 0) for parts in rows.values()], dtype=float)
        ax.barh(list(rows), widths, left=left, color=THINGS.get(name, shade), label=name)
        left += widths
    if measured:
        ax.plot(list(measured.values()), list(measured), "D", color="black", ms=5, label="measured")
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(**LEGEND_BESIDE)
    return ax


def timeline(
    rows: Mapping[str, Sequence[tuple[str, float]]], ax: Axes, *, unit: str = "ms"
) -> Axes:
    """Parts of each row end to end in their order, a colour a name: the palette's, if it has one.

    Args:
        rows: Name of a row -> its parts as (name, length).
        ax: Axes to draw on; returned.
        unit: Unit of all lengths.
    """
    names = dict.fromkeys(name for parts in rows.values() for name, _ in parts)
    shades = _shades("tab10")
    expect(len(names) <= len(shades), "rows", f"at most {len(shades)} different names", len(names))
    for row, parts in enumerate(rows.values()):
        starts = np.cumsum([0, *(length for _, length in parts)])
        for name, shade in zip(names, shades, strict=False):
            spans = [
                (start, length)
                for start, (part, length) in zip(starts, parts, strict=False)
                if part == name
            ]
            label = name if row == 0 else ""  # in the legend once
            face = THINGS.get(name, shade)
            ax.broken_barh(
                spans, (row - 0.4, 0.8), facecolor=face, edgecolor="white", lw=0.3, label=label
            )
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlabel(f"time, {unit}")
    ax.legend(**LEGEND_BESIDE)
    return ax


def padded_batches(batches: Sequence[np.ndarray], ax: Axes, *, unit: str = "length, s") -> Axes:
    """A bar an utterance, batch after batch: dark its own length, pale the padding.

    Args:
        batches: Lengths of the utterances of each batch.
        ax: Axes to draw on; returned.
        unit: Quantity and unit of the lengths.
    """
    starts = np.cumsum([0, *(len(batch) + 2 for batch in batches)])
    for start, batch in zip(starts, batches, strict=False):
        middle = start + (len(batch) - 1) / 2
        ax.bar(middle, max(batch), width=len(batch), color=RED, alpha=0.35, lw=0)
        ax.bar(start + np.arange(len(batch)), batch, width=1.0, color=BLUE, lw=0)
    ax.set(xlabel="utterances, batch after batch", ylabel=unit, xlim=(-2, starts[-1]))
    return ax


def tornado(
    swings: Mapping[str, tuple[float, float]], middle: float, ax: Axes, *, unit: str = ""
) -> Axes:
    """How far the outcome moves with each input; blue where it is lowest, red where highest.

    Args:
        swings: Input -> the outcomes at its lowest and at its highest; the first is on top.
        middle: The outcome with every input in the middle.
        ax: Axes to draw on; returned.
        unit: Unit of the outcome.
    """
    ends_of_input = ("input at its lowest", "input at its highest")
    for row, outcomes in enumerate(swings.values()):
        for outcome, colour, name in zip(outcomes, COLOURS[:2], ends_of_input, strict=True):
            label = name if row == 0 else ""  # in the legend once
            ax.barh(row, outcome - middle, left=middle, height=0.6, color=colour, label=label)
    ax.axvline(middle, color="black", lw=0.8)
    ax.set_yticks(range(len(swings)), list(swings))
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(**LEGEND_BESIDE)
    return ax
