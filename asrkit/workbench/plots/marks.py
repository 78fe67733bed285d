"""Marks that several notebooks draw: bars, dots, intervals and a lattice."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import (
    BLUE,
    GREY,
    RED,
    THINGS,
    colours_of,
    fading,
)
from asrkit.workbench.tables import three_digits


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    ax: Axes,
    *,
    measured: Mapping[str, float] | None = None,
    unit: str = "",
) -> Axes:
    """A horizontal bar for each row, stacked from its parts; measured totals are diamonds.

    Args:
        rows: Name of a row -> name of a part -> its size. Parts of one name have one colour, which
            comes from the palette if the palette has the name.
        ax: Axes to draw on; returned.
        measured: Measured totals of some rows, by name.
        unit: Unit of all sizes.
    """
    names = [name for parts in rows.values() for name, size in parts.items() if size]
    left = np.zeros(len(rows))
    for name, shade in colours_of(names).items():
        widths = [parts.get(name, 0) for parts in rows.values()]
        ax.barh(list(rows), widths, left=left, color=shade, label=name)
        left += widths
    if measured:
        ax.plot(list(measured.values()), list(measured), "D", color="black", ms=5, label="measured")
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(**LEGEND_BESIDE)
    return ax


def dots(
    values: Mapping[str, Sequence[float]],
    ax: Axes,
    *,
    unit: str = "",
    limit: tuple[str, float] | None = None,
) -> Axes:
    """A row for each value: a dot, its number, and a line over its spread, on a logarithmic axis.

    Args:
        values: Name of a row -> (value,) or (low, middle, high). A name in the palette has its
            colour; others are black.
        ax: Axes to draw on; returned.
        unit: Quantity and unit of all values.
        limit: Name and value of a dashed line, such as a lower bound.
    """
    numbers = [number for ends in values.values() for number in ends]
    for row, (name, ends) in enumerate(values.items()):
        shade = THINGS.get(name, "black")
        middle = ends[len(ends) // 2]
        ax.plot([ends[0], ends[-1]], [row, row], color=shade, lw=2)
        ax.plot(middle, row, "o", color=shade, ms=8)
        ax.annotate(
            three_digits(middle),
            (ends[-1], row),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    if limit is not None:
        name, place = limit
        numbers.append(place)
        ax.axvline(place, color=GREY, lw=1, ls="--")
        ax.annotate(name, (place, -0.6), (4, 0), textcoords="offset points", fontsize=8)
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.5, -0.9)
    ax.set(xscale="log", xlabel=unit, xlim=(min(numbers) / 2, max(numbers) * 4))
    ax.xaxis.set_major_formatter(lambda x, _: three_digits(x))
    ax.xaxis.set_minor_formatter("")
    ax.grid(axis="y", lw=0.4)
    return ax


def intervals(
    rows: Mapping[str, tuple[float, float, float]], ax: Axes, *, unit: str = "times as fast"
) -> Axes:
    """A row for each ratio: a dot, and a line over its interval, on a linear axis.

    A row is blue if its whole interval is above 1, red if it is below 1, and grey if it includes 1.

    Args:
        rows: Name of a row -> (lower end, value, upper end), from top to bottom.
        ax: Axes to draw on; returned.
        unit: Unit of the ratios.
    """
    for row, (low, value, high) in enumerate(rows.values()):
        shade = GREY
        if low > 1:
            shade = BLUE
        elif high < 1:
            shade = RED
        ax.plot([low, high], [row, row], color=shade, lw=2.5, alpha=0.5, solid_capstyle="butt")
        ax.plot(value, row, "o", color=shade, ms=6)
        text = f"{value:.2f}"
        ax.annotate(text, (value, row), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    ax.axvline(1, color="black", lw=0.8)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.7)
    ax.set_xlabel(unit)
    return ax


def lattice(values: Tensor, labels: Sequence[str], ax: Axes, *, caption: str) -> Axes:
    """Values of the nodes of a transducer lattice, with frames to the right and labels upwards.

    Args:
        values: One value for each node, (T, U1).
        labels: The U labels, one for each row above the first.
        ax: Axes to draw on; returned.
        caption: Meaning of the colours.
    """
    image = ax.imshow(values.T.numpy(), origin="lower", aspect="auto", cmap=fading(BLUE))
    rows = ["∅", *labels]
    ax.set_yticks(range(len(rows)), [row.replace(" ", "␣") for row in rows])
    ax.set(xlabel="encoder frame t", ylabel="labels emitted so far, u")
    ax.figure.colorbar(image, ax=ax, label=caption)
    return ax
