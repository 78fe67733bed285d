"""A batch that runs in phases, and what the ranks of a step have to do."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from asrkit.data import computed_seconds
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import colour

SHADES = (0.45, 0.25)  # of padding in one phase and the next, so that phases can be told apart


def phased_batch(
    lengths: Sequence[float] | np.ndarray,
    phases: Sequence[tuple[float, int]],
    ax: Axes,
    *,
    slowest: float | None = None,
    unit: str = "length, s",
) -> Axes:
    """Utterances as bars, the longest first, in front of the cells that each phase computes.

    Args:
        lengths: Of each utterance (B,), in any order.
        phases: (end, rows) of each phase, in the unit of the lengths: `asrkit.models.phases`, or
            `asrkit.data.Plan.phases` for seconds.
        ax: Axes to draw on; returned.
        slowest: What the slowest rank of the step computes for an utterance in the mean, drawn as a
            dashed line; None for one rank.
        unit: Quantity and unit of the lengths.
    """
    B = len(lengths)
    longest_first = np.sort(lengths)[::-1]
    start = 0.0
    for number, (end, rows) in enumerate(phases):
        label = ""
        if number == 0:  # in the legend once
            label = "padding"
        ax.bar(
            rows / 2,
            end - start,
            width=rows,
            bottom=start,
            color=colour("padding"),
            alpha=SHADES[number % 2],
            lw=0,
            label=label,
        )
        start = end
    middles = np.arange(B) + 0.5
    ax.bar(middles, longest_first, width=1.0, color=colour("useful"), lw=0, label="useful")
    if slowest is not None:
        ax.axhline(slowest, color="black", lw=1, ls="--", label="slowest rank,\nan utterance")
    ax.set(xlabel="utterances, the longest first", ylabel=unit, xlim=(0, B))
    ax.legend(**LEGEND_BESIDE)
    return ax


def rank_work(
    batches: Sequence[np.ndarray],
    ax: Axes,
    *,
    phases: int = 1,
    most: float | None = None,
) -> Axes:
    """What each rank of a step computes: useful seconds, padding, and waiting for the slowest.

    Args:
        batches: Seconds of the utterances of each rank's batch.
        ax: Axes to draw on; returned.
        phases: Phases in which each rank runs its batch at most.
        most: Upper end of the vertical axis, so that two pictures can be compared.
    """
    useful = np.array([float(np.sum(seconds)) for seconds in batches])
    computed = np.array([computed_seconds(seconds, phases) for seconds in batches])
    slowest = computed.max()
    parts = {
        "useful": useful,
        "padding": computed - useful,
        "waiting": slowest - computed,
    }
    ranks = np.arange(len(batches))
    bottom = np.zeros(len(batches))
    for name, heights in parts.items():
        ax.bar(ranks, heights, bottom=bottom, color=colour(name), label=name)
        bottom = bottom + heights
    ax.axhline(slowest, color="black", lw=1, ls="--", label="slowest rank")
    ax.set(xlabel="rank", ylabel="encoder work, s of audio")
    ax.set_xticks(ranks)
    if most is not None:
        ax.set_ylim(0, most)
    ax.legend(**LEGEND_BESIDE)
    return ax
