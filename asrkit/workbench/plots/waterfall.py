"""What each of several speed-ups gives, one on top of the other."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from asrkit.shapes import expect
from asrkit.workbench.plots.palette import BLUE, GREY, RED

TICK_STEPS = (  # within a power of ten, from few ticks to many
    (1,),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
)


def waterfall(
    rates: Mapping[str, float],
    axes: Sequence[Axes],
    *,
    alone: Mapping[str, float],
    limits: Mapping[str, float],
    spread: Mapping[str, tuple[float, float]] | None = None,
    unit: str = "RTFx",
) -> Sequence[Axes]:
    """A bar a rung, from the rate of the rung above to its own; and beside it what a rung gives.

    A bar is blue where the rung is faster than the one above, red where it is slower, and grey for
    the first. Scales are logarithmic: equal gains are equally long.

    Args:
        rates: Rung -> its rate with all rungs above it.
        axes: Two Axes to draw on; returned.
        alone: Rung -> its gain on the first rung, without those between; drawn hollow.
        limits: Rung -> the rate that the machine allows; a rung's share of it is in brackets.
        spread: Rung -> ends of a line over its gain on the rungs above.
        unit: Unit of the rates.
    """
    expect(min(rates.values()) > 0, "rates", "above 0", rates)
    names = list(rates)
    left, right = axes
    _draw_rates(rates, limits, unit, left)
    gains = {}
    for above, name in pairwise(names):
        gains[name] = rates[name] / rates[above]
    on_first = {name: gain for name, gain in alone.items() if name in gains}
    _draw_gains(names, gains, "on those above", BLUE, right)
    _draw_gains(names, on_first, "alone", "white", right)
    for name, ends in (spread or {}).items():
        row = names.index(name)
        right.plot(ends, [row, row], color=BLUE, lw=1.5)
    right.axvline(1, color="black", lw=0.8)
    right.set(xscale="log", xlabel="times as fast")
    right.legend(
        frameon=False,
        fontsize=8,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
    )
    rows = range(len(names))
    left.set_yticks(rows, names)
    right.set_yticks(rows, [""] * len(rows))
    for ax in (left, right):
        ax.set_ylim(len(rows) - 0.4, -0.6)
        _plain_ticks(ax)
    return axes


def _draw_rates(
    rates: Mapping[str, float], limits: Mapping[str, float], unit: str, ax: Axes
) -> None:
    values = np.array(list(rates.values()), dtype=float)
    rows = np.arange(len(values))
    lowest = values.min() / 1.5
    before = np.concatenate([values[:1], values[:-1]])
    start = np.concatenate([[lowest], values[:-1]])
    colours = np.where(values < before, RED, BLUE)
    colours[0] = GREY
    ax.barh(rows, values - start, left=start, height=0.65, color=colours)
    for row, name in enumerate(rates):
        rate = values[row]
        share = rate / limits[name]
        bar_end = max(before[row], rate)
        next_row = min(row + 1, len(rows) - 1)
        ax.annotate(
            f"{rate:,.3g} ({share:.1%})",
            (bar_end, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        ax.plot([rate, rate], [row, next_row], color="black", lw=0.6)
    highest = values.max() ** 1.3 / lowest**0.3  # room for the words
    ax.set(
        xscale="log",
        xlabel=f"{unit} (share of what the machine allows)",
        xlim=(lowest, highest),
    )


def _draw_gains(
    names: Sequence[str], gains: Mapping[str, float], label: str, face: str, ax: Axes
) -> None:
    rows = []
    values = []
    for row, name in enumerate(names):
        if name in gains:
            rows.append(row)
            values.append(gains[name])
    ax.plot(values, rows, "o", mec=BLUE, mfc=face, ms=7, label=label)


def _plain_ticks(ax: Axes) -> None:
    """Ordinary numbers on a logarithmic axis, at least three of them however short it is."""
    low, high = ax.get_xlim()
    ticks = list[float]()
    for steps in TICK_STEPS:
        candidates = [step * 10.0**power for power in range(-4, 8) for step in steps]
        ticks = [tick for tick in candidates if low <= tick <= high]
        if len(ticks) >= 3:
            break
    ax.set_xticks(ticks, [f"{tick:,.3g}" for tick in ticks])
    ax.minorticks_off()
