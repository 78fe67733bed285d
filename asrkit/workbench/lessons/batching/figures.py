"""Batches of unequal lengths: padding over spread, utilisation, shuffling, epochs, losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from asrkit.workbench.plots.marks import stacked
from asrkit.workbench.plots.palette import BLUE, COLOURS, THINGS

BESIDE: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8,
    "loc": "center left",
    "bbox_to_anchor": (1, 0.5),
}
MARKERS = "os^D"


def _shade(way: str, number: int) -> str:
    """Colour of a way to make batches: its own in the whole series, else that of its number."""
    return THINGS.get(way, COLOURS[number])


def padding_over_spread(
    curves: Mapping[int, Sequence[float]],
    spreads: Sequence[float],
    corpora: Mapping[str, tuple[float, float]],
    ax: Axes,
) -> Axes:
    """Share of padding in random batches over the spread of the lengths.

    Args:
        curves: Utterances of a batch -> padding of log-normal lengths, one for each spread.
        spreads: Deviation of the logarithm of the length.
        corpora: Name of a set -> its spread, and its padding in batches of 32: markers.
        ax: Axes to draw on; returned.
    """
    for shade, (n, padding) in zip(COLOURS, curves.items(), strict=False):
        ax.plot(spreads, padding, color=shade, label=f"log-normal, batches of {n}")
    for marker, (name, point) in zip(MARKERS, corpora.items(), strict=False):
        ax.plot(*point, marker, color="black", label=f"{name}, batches of 32")
    ax.axhline(0.5, color="gray", lw=0.8, ls=":")
    ax.set(xlabel="spread: deviation of the logarithm of the length", ylabel="share of padding")
    ax.set(xlim=(0, max(spreads)), ylim=(0, 1))
    ax.legend(**BESIDE)
    return ax


def utilisation_lines(
    curves: pd.DataFrame, ax: Axes, *, xlabel: str, legend: bool = True, low: float = 0.0
) -> Axes:
    """Utilisation in per cent, a line for each column over the index.

    Args:
        curves: Column: a way to make batches; index: what is varied.
        ax: Axes to draw on; returned.
        xlabel: What is varied.
        legend: Whether to name the lines, beside the Axes.
        low: Where the vertical axis begins.
    """
    for number, name in enumerate(curves):
        shade = _shade(name, number)
        ax.plot(curves.index, curves[name], "o-", ms=4, color=shade, label=name)
    ax.set(xlabel=xlabel, ylabel="utilisation, %", ylim=(low, 100))
    if legend:
        ax.legend(**BESIDE)
    return ax


def epochs_over_batch(runs: pd.DataFrame, ax: Axes) -> Axes:
    """Epochs that runs took to reach their target over the global batch, a line a bucket count.

    Args:
        runs: Columns status, buckets, global_batch and epochs, a row a run.
        ax: Axes to draw on; returned.
    """
    done = runs[runs["status"] == "success"]
    lost = runs[runs["status"] != "success"]
    spread = done.groupby(["buckets", "global_batch"])["epochs"].agg(["mean", "std"])
    for shade, (buckets, rows) in zip(COLOURS, spread.groupby("buckets"), strict=False):
        batches = rows.index.get_level_values("global_batch")
        words = "bucket"
        if buckets > 1:
            words = "buckets"
        label = f"{buckets} {words}, mean and deviation of the runs"
        line: dict[str, Any] = {"fmt": "o-", "ms": 5, "capsize": 3, "color": shade, "label": label}
        ax.errorbar(batches, rows["mean"], rows["std"], **line)
    ax.plot(
        lost["global_batch"], lost["epochs"], "x", color="black", label="stopped without success"
    )
    sizes = sorted(set(runs["global_batch"]))
    ax.set(xscale="log", xlabel="global batch, utterances", ylim=(0, 130))
    ax.set_ylabel("epochs until WER 5.8 %")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.legend(frameon=False)
    return ax


def shuffling(
    balanced: Mapping[tuple[float, float], tuple[float, float]],
    others: Mapping[str, tuple[float, float]],
    ax: Axes,
) -> Axes:
    """Utilisation over the pairs of utterances that meet again in the next epoch.

    Args:
        balanced: Blur of seconds and tokens -> pairs that meet again, and utilisation, in per cent.
        others: Another way -> the same two numbers.
        ax: Axes to draw on; returned.
    """
    again, used = zip(*balanced.values(), strict=True)
    label = "balanced; below: blur of seconds, tokens"
    ax.plot(again, used, "o-", color=BLUE, label=label)
    for (of_seconds, of_tokens), point in balanced.items():
        words = f"{100 * of_seconds:.1f} %, {100 * of_tokens:.0f} %"
        ax.annotate(words, point, (0, -14), textcoords="offset points", ha="center", fontsize=8)
    for number, (name, point) in enumerate(others.items()):
        ax.plot(*point, MARKERS[number + 1], color=_shade(name, number + 1), label=name)
    ax.set_xlabel("of pairs that shared a batch, how many share one in the next epoch, %")
    ax.set(ylabel="utilisation, %", xlim=(-2, 60), ylim=(0, 100))
    ax.legend(frameon=False, loc="lower right")
    return ax


def loss_over_padded_speech(
    runs: Sequence[tuple[str, Sequence[float], Sequence[float]]], ax: Axes, *, smooth: int = 15
) -> Axes:
    """Running median of the loss over the seconds computed so far, a colour for each way.

    Args:
        runs: (way, padded seconds after each step, loss of each step).
        ax: Axes to draw on; returned.
        smooth: Steps of the running median.
    """
    ways = list(dict.fromkeys(way for way, _, _ in runs))
    named = set[str]()
    for way, padded_s, losses in runs:
        median = pd.Series(losses).rolling(smooth, min_periods=1).median()
        label = ""
        if way not in named:  # in the legend once
            label = way
        named.add(way)
        ax.plot(padded_s, median, color=_shade(way, ways.index(way)), label=label)
    ax.set(xlabel="seconds computed, padding included", ylabel="loss, nats per label")
    ax.set_yscale("log")
    ax.legend(frameon=False)
    return ax


def lengths_and_shares(
    seconds: np.ndarray, shares: Mapping[str, Mapping[str, float]], axes: Sequence[Axes]
) -> Sequence[Axes]:
    """A histogram of lengths, and beside it how each way to batch them uses the ranks' time.

    Args:
        seconds: Length of each utterance, (N,).
        shares: Way -> part -> per cent.
        axes: Two Axes; returned.
    """
    left, right = axes
    left.hist(seconds, bins=60, color=BLUE)
    left.set(xlabel="length, s", yticks=[], xlim=(0, 40))
    left.set_title(f"{seconds.mean():.1f} s on average")
    stacked(shares, right, unit="% of what the GPUs could compute")
    right.set_xlim(0, 100)
    return axes
