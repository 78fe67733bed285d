"""What transcription costs over how fast it is, and how long it takes on how many workers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.cost import Outcome, Range, TranscriptionCost, transcription_cost
from asrkit.workbench.plots.palette import GREEN, GREY, PALE_BLUE, colour

UNITS = {"core": "cores", "gpu": "GPUs"}
DASHES = ("-", "--", ":", "-.")  # of the machines of a kind
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
    for row, cost in enumerate(costs):
        speed = cost.speed
        name = f"{cost.instance.name}, RTFx {speed.rtfx.middle:,.4g} {speed.origin}"
        shade = colour(UNITS[speed.per])
        if row == 0:
            shade = GREEN
        ax.barh(name, cost.usd.middle, color=shade)
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
    fastest = max(one.middle for one in rtfx.values())
    for name, one in rtfx.items():
        shade = PALE_BLUE
        if one.middle == fastest:
            shade = colour("cores")
        error = [[one.middle - one.low], [one.high - one.middle]]
        ax.barh(name, one.middle, xerr=error, color=shade, height=0.6, capsize=3)
        ax.annotate(
            f"{one.middle:.1f}",
            (one.high, name),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ax.axvline(published, color="gray", ls=":", label=f"published: {published:g}")
    equal = f"costs what the GPUs cost: {break_even:.0f}"
    ax.axvline(break_even, color=colour("GPUs"), ls="--", label=equal)
    ax.invert_yaxis()
    ax.set(xlabel="RTFx of one core; medians and quartiles")
    ax.set_xlim(0, 1.1 * max(break_even, *(one.high for one in rtfx.values())))
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def break_even(costs: Sequence[TranscriptionCost], ax: Axes) -> Axes:
    """USD of a million hours of speech over the RTFx of one core or GPU, a line a machine.

    Lines of cores have one colour and those of GPUs another, and several machines of a kind differ
    in their dashes. They are pale from the lowest to the highest price. A marker is an RTFx that
    somebody has seen, with its origin; it is filled where this project measured. Two machines cost
    the same where one horizontal line crosses both.

    Args:
        costs: Costs of machines at the speeds that somebody has seen.
        ax: Axes to draw on; returned.
    """
    first_of_machine = dict[str, TranscriptionCost]()
    for cost in costs:
        first_of_machine.setdefault(cost.instance.name, cost)
    drawn = Counter[str]()
    speeds = [end for cost in costs for end in cost.speed.rtfx.ends]
    rtfx = np.geomspace(min(speeds) / 3, max(speeds) * 3, 100)
    for cost in first_of_machine.values():
        per = cost.speed.per
        _draw_line(cost, rtfx, DASHES[drawn[per] % len(DASHES)], ax)
        drawn[per] += 1
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
    terms = vars(cost.terms)
    ends = []
    for value in rtfx:
        rtfx_range = Range.of(float(value))
        speed = replace(cost.speed, rtfx=rtfx_range)
        at_speed = transcription_cost(cost.instance, speed, **terms)
        ends.append(at_speed.usd_per_million_hours.ends)
    low, middle, high = np.transpose(ends)
    per = cost.speed.per
    label = f"{cost.instance.name}, {cost.instance.units(per)} {UNITS[per]}"
    shade = colour(UNITS[per])
    ax.plot(rtfx, middle, dashes, color=shade, label=label)
    ax.fill_between(rtfx, low, high, color=shade, alpha=0.2, lw=0)


def _draw_marker(cost: TranscriptionCost, ax: Axes, *, above: bool) -> None:
    """A speed that somebody has seen; neighbours have their words on either side of the line."""
    x = cost.speed.rtfx.middle
    y = cost.usd_per_million_hours.middle
    shade = colour(UNITS[cost.speed.per])
    face = shade
    if cost.speed.origin in NOT_MEASURED:
        face = "white"
    ax.plot(x, y, "o", color=shade, mfc=face, zorder=3)
    origin = cost.speed.origin.partition(",")[0]
    offset, alignment = BELOW_LEFT
    if above:
        offset, alignment = ABOVE_RIGHT
    ax.annotate(
        f"{x:,.4g}, {origin}",
        (x, y),
        offset,
        textcoords="offset points",
        fontsize=8,
        ha=alignment,
    )


def days_over_workers(lines: Mapping[tuple[str, str], Sequence[Outcome]], ax: Axes) -> Axes:
    """Days until a corpus is transcribed over the number of workers, beside the days without waste.

    Args:
        lines: For each (kind, words of the legend) the outcomes of ascending numbers of workers.
            A kind is a thing of the palette, "cores" or "GPUs"; its lines differ in their dashes.
        ax: Axes to draw on; returned.
    """
    drawn = Counter[str]()
    for (kind, words), outcomes in lines.items():
        workers = [outcome.fleet.workers for outcome in outcomes]
        ideal = [outcome.days * outcome.utilisation for outcome in outcomes]
        dashes = DASHES[drawn[kind] % len(DASHES)]
        ax.plot(workers, ideal, color=GREY, lw=0.7)
        label = f"{kind}, {words}"
        days = [outcome.days for outcome in outcomes]
        ax.plot(workers, days, dashes, marker="o", ms=4, color=colour(kind), label=label)
        drawn[kind] += 1
    ax.set(xscale="log", yscale="log", xlabel="workers", ylabel="days")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter("{x:,.4g}")
    ax.legend(frameon=False, fontsize=8)
    return ax
