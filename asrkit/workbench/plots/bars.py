"""Bars: made of parts, along a timeline, and of steps."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import BLUE, GREEN, GREY, RED, colours_of


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
    for name, colour in colours_of(names).items():
        widths = np.array([parts.get(name, 0) for parts in rows.values()], dtype=float)
        ax.barh(list(rows), widths, left=left, color=colour, label=name)
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
    for row, parts in enumerate(rows.values()):
        lengths = [length for _, length in parts]
        starts = np.cumsum([0, *lengths])
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for start, (name, length) in zip(starts, parts, strict=False):
            spans[name].append((start, length))
        for name, colour in colours_of(names).items():
            label = ""
            if row == 0:  # in the legend once
                label = name
            ax.broken_barh(
                spans[name],
                (row - 0.4, 0.8),
                facecolor=colour,
                edgecolor="white",
                lw=0.3,
                label=label,
            )
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlabel(f"time, {unit}")
    ax.legend(**LEGEND_BESIDE)
    return ax


def waterfall(levels: Mapping[str, float], ax: Axes, *, unit: str = "") -> Axes:
    """What each step takes away: the first level from zero, then bars from level to level.

    A step that takes something away is green, one that adds something red. The number beside a bar
    is the level after its step. The last level is drawn once more, from zero.

    Args:
        levels: Step -> what is left after it; two at least, the first being the start.
        ax: Axes to draw on; returned.
        unit: Unit of the levels.
    """
    names = list(levels)
    before = 0.0
    for row, level in enumerate(levels.values()):
        shade = GREEN
        if level > before:
            shade = RED
        if row == 0:
            shade = GREY
        ax.barh(row, abs(level - before), left=min(level, before), height=0.6, color=shade)
        ax.text(max(level, before), row, f" {level:.3g}", va="center", fontsize=8)
        before = level
    last = len(names)
    ax.barh(last, before, height=0.6, color=BLUE)
    ax.text(before, last, f" {before:.3g}", va="center", fontsize=8)
    ax.set_yticks(range(last + 1), [*names, "what is left"])
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel(unit)
    return ax
