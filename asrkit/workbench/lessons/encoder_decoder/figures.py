"""Encoder-decoder models: a step drawn to scale, work by part, deep against shallow, drafts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from asrkit.workbench.cost import CARDS, Card
from asrkit.workbench.lessons.encoder_decoder.counts import aed_bytes, aed_flops
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.marks import stacked
from asrkit.workbench.plots.palette import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    PALE_BLUE,
    PURPLE,
    RED,
    colour,
    colours_of,
)

CELLS_A_ROW = 50
# colours of the ways of decoding that `asrkit.workbench.lessons.encoder_decoder.studies.WAYS` names
WAY_COLOURS = {"no cache": GREY, "NeMo 3.0": RED, "K/V kept": BLUE, "absorbed": GREEN}
# what a step takes at least its time for, and the colour of its line
FLOOR_COLOURS = {"weights": BROWN, "keys and values": BLUE, "operations": PALE_BLUE}
STYLES = ("-", "--", ":")


def step_cells(parts: Mapping[str, int], ax: Axes, *, rows: int | None = None) -> Axes:
    """The products of one step of one layer as cells, a cell for each D x D product.

    Args:
        parts: Name of a part -> its cells. A part has the palette's colour if it knows the name.
        ax: Axes to draw on; returned.
        rows: Rows that there is room for, so that two pictures have one scale; None for as many
            as are needed.
    """
    rows = rows or -(-sum(parts.values()) // CELLS_A_ROW)
    start = 0
    for name, shade in colours_of(parts).items():
        end = start + parts[name]
        label = f"{name}: {parts[name]}"
        for row, first, last in _runs(start, end):
            place = (first, row)
            ax.add_patch(Rectangle(place, last - first, 1, facecolor=shade, lw=0, label=label))
            label = ""
        start = end
    for column in range(1, CELLS_A_ROW):
        ax.axvline(column, color="white", lw=0.8)
    for row in range(1, rows):
        ax.axhline(row, color="white", lw=0.8)
    ax.set(xlim=(0, CELLS_A_ROW), ylim=(rows, 0), aspect="equal")
    ax.axis("off")
    ax.legend(**LEGEND_BESIDE)
    return ax


def _runs(start: int, end: int) -> list[tuple[int, int, int]]:
    """Cells from `start` to `end` as (row, first column, column behind the last)."""
    runs = []
    while start < end:
        row, first = divmod(start, CELLS_A_ROW)
        last = min(CELLS_A_ROW, first + end - start)
        runs.append((row, first, last))
        start += last - first
    return runs


def decoder_work(
    models: Mapping[str, Mapping[str, Mapping[str, float]]],
    axes: Sequence[Axes],
    *,
    unit: str,
) -> Sequence[Axes]:
    """Work or time by part, a bar for each way of decoding, an Axes for each model, on one scale.

    Args:
        models: Name of a model -> name of a way -> part -> size.
        axes: One for each model; returned.
        unit: Quantity and unit of all sizes.
    """
    most = max(sum(parts.values()) for rows in models.values() for parts in rows.values())
    for (name, rows), ax in zip(models.items(), axes, strict=True):
        stacked(rows, ax, unit=unit)
        ax.set_title(name, fontsize=10)
        ax.set_xlim(0, 1.12 * most)
        ax.xaxis.set_major_formatter("{x:,g}")
        for row, parts in enumerate(rows.values()):
            total = sum(parts.values())
            ax.annotate(
                f"{total:,.0f}",
                (total, row),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    for ax in axes[:-1]:
        legend = ax.get_legend()
        assert legend is not None  # of `stacked`
        legend.remove()
    for ax in axes[1:]:
        ax.tick_params(labelleft=False)
    return axes


def deep_over_shallow(
    ratios: Mapping[str, Mapping[int, Sequence[float]]],
    ax: Axes,
    *,
    operations: Mapping[str, float] | None = None,
) -> Axes:
    """How many times as long the deep model takes, over the batch: a line for each way.

    Args:
        ratios: Name of a way -> batch -> time of the deep model over that of the shallow one, one
            for each repeat. The line is the median, the band has the middle half.
        ax: Axes to draw on; returned.
        operations: Name of a way -> ratio of the operations, a dashed line.
    """
    for name, by_batch in ratios.items():
        batches = list(by_batch)
        values = [np.asarray(samples) for samples in by_batch.values()]
        middle = [float(np.median(samples)) for samples in values]
        low = [float(np.percentile(samples, 25)) for samples in values]
        high = [float(np.percentile(samples, 75)) for samples in values]
        shade = WAY_COLOURS.get(name, PURPLE)
        ax.fill_between(batches, low, high, color=shade, alpha=0.15, lw=0)
        ax.plot(batches, middle, "o-", color=shade, ms=4, label=name)
        if operations and name in operations:
            ax.axhline(operations[name], color=shade, lw=1, ls="--")
    ax.axhline(1, color="black", lw=1)
    ax.annotate(
        "both take as long", (1, 1), (2, 3), textcoords="offset points", fontsize=8, va="bottom"
    )
    _log_batches(ax, [batch for by_batch in ratios.values() for batch in by_batch])
    ax.set_ylabel("time, deep over shallow")
    ax.legend(**LEGEND_BESIDE)
    return ax


def decoding_steps(
    lengths: Sequence[int], ax: Axes, *, accepted: Sequence[int] | None = None
) -> Axes:
    """A row for each utterance: its steps, and those that it waits for the last one.

    Args:
        lengths: Tokens of each text, eos included.
        ax: Axes to draw on; returned.
        accepted: Tokens of a draft that are right up to its first error; the first step takes
            them all, and one more.
    """
    texts = np.asarray(lengths)
    drafted = np.zeros_like(texts) if accepted is None else np.asarray(accepted)
    steps = texts - drafted
    last = steps.max()
    rows = np.arange(len(texts))
    saved = "tokens of the draft"
    if accepted is not None:
        ax.barh(rows, -drafted, height=1.0, color=PURPLE, label=f"{saved}, in the first step")
        ax.axvline(0, color="black", lw=0.8)
    ax.barh(rows, steps, height=1.0, color=colour("steps"), label="steps")
    idle: dict[str, Any] = {"color": colour("waiting"), "alpha": 0.35, "label": "waiting"}
    ax.barh(rows, last - steps, left=steps, height=1.0, **idle)
    ax.set(xlabel="steps of the decoder", ylabel="utterance", ylim=(len(texts) - 0.5, -0.5))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ticks = [tick for tick in ax.get_xticks() if tick <= last]
    ax.set_xticks(ticks, [f"{abs(tick):.0f}" for tick in ticks])
    return ax


def step_floor(
    sizes: Mapping[str, Mapping[str, int]],
    batches: Sequence[int],
    ax: Axes,
    *,
    T: int,
    U: int,
    card: str,
) -> Axes:
    """Least time of a step over the batch by a card's data sheet, in half precision: predicted.

    Weights are read whatever the batch; keys and values of frames and text grow with it.
    Operations stay below both.

    Args:
        sizes: Name of a model -> D, layers, V and heads of its decoder.
        batches: Utterances, in ascending order.
        ax: Axes to draw on; returned.
        T: Encoder frames of an utterance.
        U: Tokens so far.
        card: Name of one of `cost.CARDS` whose rates are known.
    """
    cards = {known.name: known for known in CARDS if known.half_TFLOP_per_s}
    for (name, one), style in zip(sizes.items(), STYLES, strict=False):
        for part, times_ms in _floors_ms(one, batches, T=T, U=U, card=cards[card]).items():
            shade = FLOOR_COLOURS[part]
            ax.plot(batches, times_ms, style, color=shade, lw=1.8, label=f"{name}: {part}")
    _log_batches(ax, batches)
    ax.set(yscale="log", ylabel="a step takes at least, ms")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend(**LEGEND_BESIDE)
    return ax


def _floors_ms(
    one: Mapping[str, int], batches: Sequence[int], *, T: int, U: int, card: Card
) -> dict[str, list[float]]:
    """Least milliseconds of a step by what sets them, one for each batch.

    Args:
        one: D, layers, V and heads of a decoder.
        batches: Utterances.
        T: Encoder frames of an utterance.
        U: Tokens so far.
        card: Whose rates of memory and half precision are known.
    """
    bytes_per_ms = 1e6 * (card.memory_GB_per_s or 0)
    FLOP_per_ms = 1e9 * (card.half_TFLOP_per_s or 0)
    sizes: dict[str, Any] = {"T": T, "D": one["D"], "layers": one["layers"], "V": one["V"]}
    sizes |= {"cross": "kept", "past": "kept"}
    before = aed_flops(U=U, heads=one["heads"], **sizes).total
    step_FLOP = aed_flops(U=U + 1, heads=one["heads"], **sizes).total - before
    floors: dict[str, list[float]] = {part: [] for part in FLOOR_COLOURS}
    for B in batches:
        read = aed_bytes(B=B, U=U, **sizes)
        floors["weights"].append(read.weights_read / bytes_per_ms)
        floors["keys and values"].append((read.frames_read + read.past_read) / bytes_per_ms)
        floors["operations"].append(B * step_FLOP / FLOP_per_ms)
    return floors


def _log_batches(ax: Axes, batches: Sequence[int]) -> None:
    """A logarithmic axis of batches, with a tick for each of them."""
    ticks = sorted(set(batches))
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("batch, utterances")
