"""Values with their uncertainty, a row each."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from asrkit.workbench.plots.palette import BLUE, GREY, RED


def intervals(
    rows: Mapping[str, tuple[float, float, float]],
    ax: Axes,
    *,
    mark: float = 1.0,
    unit: str = "times as fast",
) -> Axes:
    """A dot and a line a row: a value and the ends of its interval, on a linear axis.

    A row is blue where its whole interval lies above `mark`, red where it lies below, and grey
    where the interval includes it.

    Args:
        rows: Name of a row -> lower end, value, upper end; the first is on top.
        ax: Axes to draw on; returned.
        mark: Where nothing changes: a thin vertical line.
        unit: Unit of the values.
    """
    for row, (low, value, high) in enumerate(rows.values()):
        shade = GREY
        if low > mark:
            shade = BLUE
        elif high < mark:
            shade = RED
        ax.plot([low, high], [row, row], color=shade, lw=2.5, alpha=0.5, solid_capstyle="butt")
        ax.plot([value], [row], "o", color=shade, ms=6)
        text = f"{value:.2f}"
        ax.annotate(text, (value, row), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    ax.axvline(mark, color="black", lw=0.8)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.7)
    ax.set_xlabel(unit)
    return ax
