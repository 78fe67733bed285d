"""What transcription costs over how fast it is."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.cost import UNITS, Range, TranscriptionCost
from asrkit.workbench.plots.palette import GREEN, PALE_BLUE, colour

NOT_MEASURED = ("published", "assumed")  # origins
# Where the words of a marker are: offset in points, and alignment.
ABOVE_RIGHT = ((6, 4), "left")
BELOW_LEFT = ((-6, -11), "right")


def cost_bars(costs: Sequence[TranscriptionCost], ax: Axes) -> Axes:
    """What the same speech costs on several machines, a bar each; the first one is yours, in green.

    Args:
        costs: Costs on the same terms.
        ax: Axes to draw on; returned.
    """
    names = [f"{cost.name} {cost.speed.origin}" for cost in costs]
    shades = [GREEN, *(colour(UNITS[cost.speed.per]) for cost in costs[1:])]
    ax.barh(names, [cost.usd.middle for cost in costs], color=shades)
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("USD")
    return ax


def ways_on_core(
    rtfx: Mapping[str, Range], ax: Axes, *, published: float, break_even: float
) -> Axes:
    """RTFx of one core in several ways of computing, a bar each; the fastest one is solid.

    Args:
        rtfx: Quartiles by the name of the way, the first on top.
        ax: Axes to draw on; returned.
        published: RTFx of the published core, a dotted line.
        break_even: RTFx at which a core costs what the GPUs do, a dashed line.
    """
    low, middle, high = np.transpose([one.ends for one in rtfx.values()])
    shades = [colour("cores") if one == middle.max() else PALE_BLUE for one in middle]
    quartiles = [middle - low, high - middle]
    bars = ax.barh([*rtfx], middle, xerr=quartiles, color=shades, height=0.6, capsize=3)
    ax.bar_label(bars, fmt="{:.1f}", padding=5, fontsize=9)
    ax.axvline(published, color="gray", ls=":", label=f"published: {published:g}")
    equal = f"costs what the GPUs cost: {break_even:.0f}"
    ax.axvline(break_even, color=colour("GPUs"), ls="--", label=equal)
    ax.invert_yaxis()
    ax.set(xlabel="RTFx of one core; medians and quartiles")
    ax.set_xlim(0, 1.1 * max(break_even, high.max()))
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def break_even(costs: Sequence[TranscriptionCost], ax: Axes) -> Axes:
    """USD of a million hours of speech over the RTFx of one core or GPU, a line a machine.

    Lines of cores have one colour and those of GPUs another, and a second machine of a kind is
    dashed. They are pale from the lowest to the highest price. A marker is an RTFx that somebody
    has seen, with its origin; it is filled where this project measured. Two machines cost the same
    where one horizontal line crosses both.

    Args:
        costs: Costs of machines at the speeds that somebody has seen, without startup.
        ax: Axes to draw on; returned.
    """
    speeds = [end for cost in costs for end in cost.speed.rtfx.ends]
    rtfx = np.geomspace(min(speeds) / 3, max(speeds) * 3, 100)
    dashes = {per: cycle(("-", "--")) for per in UNITS}
    first_of_machine = {cost.instance.name: cost for cost in reversed(costs)}
    for cost in reversed(first_of_machine.values()):
        _draw_line(cost, rtfx, next(dashes[cost.speed.per]), ax)
    by_speed = sorted(costs, key=lambda cost: cost.speed.rtfx.middle)
    for place, cost in enumerate(by_speed):
        _draw_marker(cost, ax, above=place % 2 == 1)
    usd = [end for cost in costs for end in cost.usd_per_million_hours.ends]
    ax.set_ylim(min(usd) / 3, max(usd) * 2)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="RTFx of one core or GPU",
        ylabel="USD for a million hours of speech",
    )
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_formatter("{x:,.4g}")
    ax.legend(frameon=False, fontsize=8)
    return ax


def _draw_line(cost: TranscriptionCost, rtfx: np.ndarray, dashes: str, ax: Axes) -> None:
    """The costs of one machine at each speed in `rtfx`."""
    per = cost.speed.per
    units = cost.instance.units(per)
    price = cost.instance.usd_per_hour / units / cost.terms.utilisation
    low, middle, high = (1e6 * usd / rtfx for usd in price.ends)
    shade = colour(UNITS[per])
    ax.plot(rtfx, middle, dashes, color=shade, label=f"{cost.instance.name}, {units} {UNITS[per]}")
    ax.fill_between(rtfx, low, high, color=shade, alpha=0.2, lw=0)


def _draw_marker(cost: TranscriptionCost, ax: Axes, *, above: bool) -> None:
    """A speed that somebody has seen; neighbours have their words on either side of the line."""
    x = cost.speed.rtfx.middle
    y = cost.usd_per_million_hours.middle
    shade = colour(UNITS[cost.speed.per])
    face = "white" if cost.speed.origin in NOT_MEASURED else shade
    ax.plot(x, y, "o", color=shade, mfc=face, zorder=3)
    offset, alignment = ABOVE_RIGHT if above else BELOW_LEFT
    ax.annotate(
        f"{x:,.4g}, {cost.speed.origin}",
        (x, y),
        offset,
        textcoords="offset points",
        fontsize=8,
        ha=alignment,
    )
