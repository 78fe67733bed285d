"""CUDA graphs: who waits when, what an op costs, floors of a turn, waits, padding of shapes."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from matplotlib.axes import Axes

from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import BLUE, COLOURS, GREEN, GREY, RED, colour
from asrkit.workbench.tables import percent

Span = tuple[float, float]  # start and length
LEGEND = {**LEGEND_BESIDE, "loc": "center left", "bbox_to_anchor": (1, 0.5)}


def schedule(
    lanes: Mapping[str, tuple[Sequence[Span], Sequence[Span]]], busy: Mapping[str, float], ax: Axes
) -> Axes:
    """Two lanes for each way, the host's above the GPU's.

    Args:
        lanes: Way -> spans of the host and spans of the GPU, in µs.
        busy: Way -> share of the time in which the GPU works.
        ax: Axes to draw on; returned.
    """
    edge: dict[str, Any] = {"edgecolor": "white", "lw": 0.5}
    for row, (host, device) in enumerate(lanes.values()):
        ax.broken_barh(host, (-row + 0.02, 0.3), facecolor=colour("host"), **edge)
        ax.broken_barh(device, (-row - 0.32, 0.3), facecolor=colour("device"), **edge)
    names = [f"{way}\nGPU busy {percent(busy[way])}" for way in lanes]
    ax.set_yticks([-row for row in range(len(lanes))], names)
    ax.set(xlabel="µs; blue: the host launches, red: the GPU works", xlim=(0, None))
    return ax


def dispatch(
    by_size: Mapping[int, float],
    by_kind: Mapping[str, float],
    floor_us: float,
    axes: Sequence[Axes],
) -> Sequence[Axes]:
    """Microseconds of a call: of an addition over its size, and of several ops on few numbers.

    Args:
        by_size: Numbers added -> microseconds.
        by_kind: Op -> microseconds.
        floor_us: What an addition of next to nothing takes: a dashed line.
        axes: Two Axes; returned.
    """
    left, right = axes
    left.plot(list(by_size), list(by_size.values()), marker="o", ms=3, color=BLUE)
    left.axhline(floor_us, color="black", lw=1, ls="--")
    left.annotate("dispatch", (1, floor_us), (0, -12), textcoords="offset points", fontsize=9)
    left.set(xscale="log", yscale="log", xlabel="numbers added", ylabel="µs a call, median")
    left.set_ylim(floor_us / 2.5, None)
    right.barh(list(by_kind), list(by_kind.values()), color=GREY, height=0.6)
    right.invert_yaxis()
    right.set(xlabel="µs a call on (2, 8), median")
    return axes


def turn_floors(
    least_us: Mapping[str, Sequence[float]],
    batches: Sequence[int],
    levels: Sequence[tuple[str, float, str]],
    ax: Axes,
) -> Axes:
    """Least time of a turn over the batch, a line a card, with level lines of the overheads.

    Args:
        least_us: Card -> microseconds, one for each batch.
        batches: Utterances decoded together.
        levels: (label, µs, line style) of each level line.
        ax: Axes to draw on; returned.
    """
    for shade, (card, times) in zip(COLOURS, least_us.items(), strict=False):
        dash = "-"
        if card == "H200":  # it has the H100's peak
            dash = ":"
        ax.plot(batches, times, dash, color=shade, label=f"{card} at its peak")
    for label, us, style in levels:
        ax.axhline(us, color="black", ls=style, label=label)
    ax.set(xscale="log", yscale="log", xlabel="utterances decoded together, B")
    ax.set_ylabel("µs a turn")
    ax.legend(**LEGEND)
    return ax


def launch_rates(
    rates: Mapping[str, tuple[float, float]], axes: Sequence[Axes], *, unit: str
) -> Sequence[Axes]:
    """Bars of launches and of waits, a row for each strategy.

    Args:
        rates: Strategy -> launches and waits.
        axes: Two Axes; returned.
        unit: What they are counted per, as "a second of speech".
    """
    rows = range(len(rates))
    shades = islice(COLOURS, 4, None)
    for number, (ax, what, shade) in enumerate(
        zip(axes, ("launches", "waits"), shades, strict=False)
    ):
        values = [pair[number] for pair in rates.values()]
        ax.barh(rows, values, color=shade, height=0.6)
        for row, value in zip(rows, values, strict=True):
            ax.annotate(
                f"{value:.3g}", (value, row), (4, 0), textcoords="offset points", va="center"
            )
        ax.set(xlabel=f"{what} {unit}", xlim=(0, 1.2 * max(values)))
        ax.invert_yaxis()
    axes[0].set_yticks(rows, list(rates))
    axes[1].set_yticks([])
    return axes


def waits_of_ways(waits: Mapping[str, float], ours: Sequence[str], ax: Axes, *, unit: str) -> Axes:
    """A dot for each way to decode, on a logarithmic axis; ours are blue, the others red.

    Args:
        waits: Way -> waits.
        ours: Ways that are blue.
        ax: Axes to draw on; returned.
        unit: What is counted, and per what.
    """
    for row, (name, value) in enumerate(waits.items()):
        shade = RED
        if name in ours:
            shade = BLUE
        ax.plot(value, row, "o", color=shade, ms=7)
        ax.annotate(
            f"{value:.2g}",
            (value, row),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ax.set_yticks(range(len(waits)), list(waits))
    ax.set(xscale="log", xlabel=f"{unit} (logarithmic)")
    ax.set_xlim(min(waits.values()) / 2, 3 * max(waits.values()))
    ax.grid(axis="y", lw=0.4)
    ax.invert_yaxis()
    return ax


def decode_times(
    times_ms: Mapping[str, Sequence[float]], blocks: Sequence[int], ax: Axes, *, turns: int
) -> Axes:
    """Time of a decode over the turns in a graph, a line for each way.

    Args:
        times_ms: Way -> milliseconds, one for each size of a block.
        blocks: Turns in a graph.
        ax: Axes to draw on; returned.
        turns: That the decode needs.
    """
    for shade, (way, times) in zip(COLOURS, times_ms.items(), strict=False):
        ax.plot(blocks, times, color=shade, label=way)
    ax.legend(**LEGEND)
    ax.set(xlabel="turns in a graph, k", ylabel=f"ms for {turns} turns", ylim=(0, None))
    return ax


def kernel_streams(streams: Mapping[str, Sequence[Span]], most_us: float, ax: Axes) -> Axes:
    """When kernels ran, a row for each way, with the share of the time in which one did.

    Args:
        streams: Way -> start and length of each kernel, in µs from the first one on.
        most_us: What is drawn, from the start.
        ax: Axes to draw on; returned.
    """
    names = []
    for row, (way, spans) in enumerate(streams.items()):
        shown = [span for span in spans if span[0] < most_us]
        ax.broken_barh(shown, (row - 0.35, 0.7), color=RED, lw=0)
        names.append(f"{way}\nbusy {percent(busy_share(shown))}")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="µs", xlim=(0, most_us))
    ax.invert_yaxis()
    return ax


def busy_share(spans: Sequence[Span]) -> float:
    """Share of the time up to the end of the last span that spans fill.

    Args:
        spans: Start and length, none overlapping.
    """
    end = max(start + length for start, length in spans)
    return sum(length for _, length in spans) / end


def padding_over_sizes(
    curves: Mapping[str, Mapping[float, tuple[int, float]]],
    package: tuple[int, float],
    ax: Axes,
) -> Axes:
    """Share of padding over the number of sizes that batches are rounded up to.

    Args:
        curves: What is rounded -> growth of the sizes -> their number, and the share wasted.
        package: The package's own number of sizes for rows, and the share that they waste.
        ax: Axes to draw on; returned.
    """
    offsets = ((4, 5), (-16, -13))  # of the words beside the points of each curve
    for shade, offset, (name, points) in zip(COLOURS, offsets, curves.items(), strict=False):
        numbers = [number for number, _ in points.values()]
        shares = [100 * share for _, share in points.values()]
        ax.plot(numbers, shares, marker="o", color=shade, label=name)
        for growth, number, share in zip(points, numbers, shares, strict=True):
            ax.annotate(
                f"×{growth:g}",
                (number, share),
                offset,
                textcoords="offset points",
                fontsize=8,
                color=shade,
            )
    number, share = package
    ax.plot(number, 100 * share, "*", ms=13, color=GREEN, label="rows in the package")
    ax.set(xlabel="sizes, each a graph", ylabel="wasted on average, %", ylim=(0, None))
    ax.legend(frameon=False, loc="upper right")
    return ax
