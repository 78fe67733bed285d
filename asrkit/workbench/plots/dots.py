"""Values as dots on a logarithmic scale, on which the length of a bar would mean nothing."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from asrkit.workbench.plots.palette import BLUE, GREY, THINGS


def dots(
    values: Mapping[str, Sequence[float]],
    ax: Axes,
    *,
    unit: str = "",
    limit: tuple[str, float] | None = None,
) -> Axes:
    """A row for each value: a dot, its number, and a line over its spread.

    Args:
        values: Name of a row -> its value alone, or (low, middle, high). Names that the palette
            knows have their colour.
        ax: Axes to draw on; returned.
        unit: Quantity and unit of all values.
        limit: Name and place of a dashed line, such as a lower bound.
    """
    lowest = min(min(ends) for ends in values.values())
    highest = max(max(ends) for ends in values.values())
    for row, (name, ends) in enumerate(values.items()):
        shade = THINGS.get(name, BLUE)
        middle = ends[len(ends) // 2]
        ax.plot([ends[0], ends[-1]], [row, row], color=shade, lw=2)
        ax.plot([middle], [row], "o", color=shade, ms=8)
        ax.annotate(
            _number(middle),
            (ends[-1], row),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    if limit is not None:
        name, place = limit
        lowest = min(lowest, place)
        ax.axvline(place, color=GREY, lw=1, ls="--")
        ax.annotate(name, (place, -0.6), (4, 0), textcoords="offset points", fontsize=8)
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.5, -0.9)
    ax.set(xscale="log", xlabel=unit, xlim=(lowest / 2, highest * 4))
    ax.xaxis.set_major_formatter(lambda x, _: _number(x))
    ax.xaxis.set_minor_formatter("")
    ax.grid(axis="y", lw=0.4)
    return ax


def _number(x: float) -> str:
    """Three significant digits; from a thousand on, all before the point."""
    if x < 1000:
        return f"{x:.3g}"
    return f"{x:,.0f}"
