"""Bars: made of parts, along a timeline, of steps, of batches, and of what an input changes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import BLUE, COLOURS, GREEN, GREY, RED, colours_of


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


def padded_batches(batches: Sequence[np.ndarray], ax: Axes, *, unit: str = "length, s") -> Axes:
    """A bar an utterance, batch after batch: dark its own length, pale the padding.

    Args:
        batches: Lengths of the utterances of each batch.
        ax: Axes to draw on; returned.
        unit: Quantity and unit of the lengths.
    """
    start = 0
    for batch in batches:
        size = len(batch)
        bars = start + np.arange(size)
        ax.bar(bars.mean(), max(batch), width=size, color=RED, alpha=0.35, lw=0)
        ax.bar(bars, batch, width=1.0, color=BLUE, lw=0)
        start += size + 2
    ax.set(
        xlabel="utterances, batch after batch",
        ylabel=unit,
        xlim=(-2, start),
    )
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
            label = ""
            if row == 0:  # in the legend once
                label = name
            ax.barh(
                row,
                outcome - middle,
                left=middle,
                height=0.6,
                color=colour,
                label=label,
            )
    ax.axvline(middle, color="black", lw=0.8)
    ax.set_yticks(range(len(swings)), list(swings))
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(**LEGEND_BESIDE)
    return ax
