"""Jasper's tables as pictures: latency and rate over work, memory, seeds, and its branches."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogFormatter, NullFormatter

from asrkit.workbench.cost import LatencyCell, two_numbers
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import (
    BLUE,
    COLOURS,
    GREY,
    PALE_BLUE,
    PALE_GREY,
    PURPLE,
    RED,
    colour,
)

PRECISIONS = {  # as tables call them
    "FP32": colour("float32"),
    "TF32": PURPLE,
    "FP16": colour("float16"),
    "BF16": colour("bfloat16"),
}
MEMORY = {"float32": colour("float32"), "mixed": colour("float16")}
MARKS = ("o", "s", "^", "D", "v")  # of durations
WIDTH = 0.4  # of a bar, of two for each batch


class PeakOverBatch(Protocol):
    """Memory of a training step, as `asrkit.workbench.lessons.jasper.studies.TrainingMemory`."""

    def peak_GiB(self, batch: int) -> float:
        """GiB of a step of `batch` utterances."""
        ...


class Seeds(Protocol):
    """Word error rates by seed, as `asrkit.workbench.lessons.jasper.studies.SeedRuns`."""

    @property
    def system(self) -> str:
        """Machine."""
        ...

    @property
    def set(self) -> str:
        """Of the corpus."""
        ...

    @property
    def percent(self) -> tuple[float, ...]:
        """Word error rate of each seed."""
        ...

    @property
    def reported(self) -> float:
        """The one that is printed."""
        ...


def latency_over_work(groups: Mapping[str, Sequence[LatencyCell]], ax: Axes) -> Axes:
    """Dots of latency over operations, and for each group the line max(floor, work / rate).

    Args:
        groups: Name -> cells of one machine and precision, at least three of different work.
        ax: Axes to draw on; returned.
    """
    for (name, cells), shade in zip(groups.items(), COLOURS, strict=False):
        fit = two_numbers(cells)
        work = np.array([cell.FLOP for cell in cells])
        label = f"{name}: {fit.floor_ms:.3g} ms, {fit.TFLOP_per_s:.3g} TFLOP/s"
        times = [cell.latency_ms for cell in cells]
        ax.plot(work / 1e12, times, "o", color=shade, ms=4, alpha=0.7, label=label)
        line = np.geomspace(work.min(), work.max(), 200)
        predicted = [fit.ms(FLOP) for FLOP in line]
        ax.plot(line / 1e12, predicted, color=shade, lw=1.5)
    ax.set(xscale="log", yscale="log", xlabel="work of a call, TFLOP", ylabel="latency, ms")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    ax.legend(**LEGEND_BESIDE)
    return ax


def rate_over_batch(cells: Sequence[LatencyCell], ax: Axes, *, peaks: Mapping[str, float]) -> Axes:
    """Operations over time, a line for each precision and duration, and what the card can do.

    Args:
        cells: Of one machine, in any precisions of FP32, TF32, FP16 and BF16.
        ax: Axes to draw on; returned.
        peaks: Precision -> TFLOP/s of the card's data sheet, a dashed line.
    """
    precisions = list(dict.fromkeys([*[cell.precision for cell in cells], *peaks]))
    durations = sorted({cell.seconds for cell in cells})
    for precision in precisions:
        for seconds, mark in zip(durations, MARKS, strict=False):
            chosen = [
                cell for cell in cells if (cell.precision, cell.seconds) == (precision, seconds)
            ]
            chosen.sort(key=lambda cell: cell.batch)
            batches = [cell.batch for cell in chosen]
            rates = [cell.TFLOP_per_s for cell in chosen]
            if chosen:
                label = f"{precision}, {seconds:g} s"
                shade = PRECISIONS[precision]
                ax.plot(batches, rates, f"{mark}-", color=shade, ms=4, lw=1, label=label)
    for precision, peak in peaks.items():
        ax.axhline(peak, color=PRECISIONS[precision], lw=1, ls="--")
        words = f"data sheet, {precision}: {peak:g}"
        ax.annotate(words, (1, peak), (0, 3), textcoords="offset points", fontsize=8)
    batches = sorted({cell.batch for cell in cells})
    ax.set(xscale="log", yscale="log", xlabel="batch, utterances", ylabel="TFLOP/s")
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend(**LEGEND_BESIDE)
    return ax


def training_memory_bars(
    memories: Mapping[str, PeakOverBatch],
    batches: Sequence[int],
    ax: Axes,
    *,
    cards: Mapping[str, float],
) -> Axes:
    """Peak memory of a training step: a group of bars for each batch, a level line for each card.

    Args:
        memories: "float32" and "mixed", or one of them -> the peak over the batch.
        batches: Utterances of a step.
        ax: Axes to draw on; returned.
        cards: Name of a GPU -> its memory in GiB.
    """
    places = np.arange(len(batches))
    for number, (precision, memory) in enumerate(memories.items()):
        heights = [memory.peak_GiB(batch) for batch in batches]
        shift = (number - (len(memories) - 1) / 2) * WIDTH
        bars = ax.bar(places + shift, heights, WIDTH, color=MEMORY[precision], label=precision)
        ax.bar_label(bars, fmt="{:.0f}", fontsize=8)
    for name, GiB in cards.items():
        ax.axhline(GiB, color=RED, lw=1, ls="--")
        place = (-0.58, GiB)
        ax.annotate(name, place, (2, 2), textcoords="offset points", fontsize=8, color=RED)
    ax.set_xticks(places, [str(batch) for batch in batches])
    ax.set(xlabel="batch, utterances", ylabel="peak of a training step, GiB")
    ax.set_xlim(-0.6, len(batches) - 0.4)
    ax.legend(**LEGEND_BESIDE)
    return ax


def seed_dots(runs: Sequence[Seeds], ax: Axes) -> Axes:
    """A row for each set and machine: a dot a seed, the mean as a bar, the reported one ringed.

    Args:
        runs: Word error rates by seed.
        ax: Axes to draw on; returned.
    """
    for row, run in enumerate(runs):
        rows = [row] * len(run.percent)
        ax.plot(run.percent, rows, "o", color=BLUE, ms=5, alpha=0.6, label=_once(row, "a seed"))
        mean = float(np.mean(run.percent))
        label = _once(row, "mean of the seeds")
        ax.plot([mean] * 2, [row - 0.3, row + 0.3], color=GREY, lw=2, label=label)
        ring: dict[str, Any] = {"mfc": "none", "mec": RED, "mew": 1.5, "ms": 11}
        ax.plot([run.reported], [row], "o", **ring, label=_once(row, "reported"))
    ax.set_yticks(range(len(runs)), [f"{run.set}, {run.system}" for run in runs])
    ax.set(ylim=(len(runs) - 0.5, -0.5), xlabel="word error rate, %")
    ax.grid(axis="y", lw=0.4)
    ax.legend(**LEGEND_BESIDE)
    return ax


def _once(row: int, label: str) -> str:
    """The label of the first row, so that the legend has it once."""
    if row == 0:
        return label
    return ""


def dense_branches(channels: Sequence[Sequence[int]], axes: Sequence[Axes]) -> Sequence[Axes]:
    """The branches of dense residuals: a square for each, and then a product for each block.

    Args:
        channels: Of each stage, the channels that its branches read, oldest first, as
            `JasperConfig.branch_channels` has them; stages without branches are left out.
        axes: Two Axes; returned. On the second, the branches of a block are one product over
            concatenated channels.
    """
    dense = [list(sizes) for sizes in channels if sizes]
    staircase, fused = axes
    for block, sizes in enumerate(dense, start=1):
        for source in range(len(sizes)):
            staircase.add_patch(_square(block, source))
        bottom = 0
        for number, size in enumerate(sizes):
            shade = (BLUE, PALE_BLUE)[number % 2]
            fused.bar(block, size, bottom=bottom, width=0.8, color=shade, lw=0)
            bottom += size
    count = sum(map(len, dense))
    blocks = np.arange(1, len(dense) + 1)
    longest = max(map(len, dense))
    staircase.set(xlim=(0.4, len(dense) + 0.6), ylim=(-0.6, longest - 0.4))
    staircase.set(xlabel="block", ylabel="reads the input of block")
    staircase.set_yticks(range(longest), [str(source + 1) for source in range(longest)])
    staircase.set_title(f"{count} convolutions of one frame", fontsize=10)
    fused.set(xlabel="block", ylabel="channels that its product reads")
    fused.yaxis.set_major_formatter("{x:,g}")
    fused.set_title(f"fused: {len(dense)} products", fontsize=10)
    for ax in axes:
        ax.set_xticks(blocks)
    return axes


def _square(block: int, source: int) -> Rectangle:
    """The branch of a block that reads the input of another, or its own."""
    shade = PALE_GREY
    if source == block - 1:  # its own input
        shade = BLUE
    return Rectangle((block - 0.4, source - 0.4), 0.8, 0.8, facecolor=shade, edgecolor="none")
