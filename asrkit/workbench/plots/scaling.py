"""Training on many GPUs: epochs, minutes, sums of gradients, and which rank holds what."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.cost import (
    DGX_A100,
    Cluster,
    EpochFit,
    Run,
    StepFit,
    cluster_all_reduce_s,
    fastest,
    predict,
)
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import BLUE, COLOURS, GREY, RED, colour

JITTER = 0.02  # of the batch, so that runs of equal epochs do not hide each other


def epochs_and_critical_batch(runs: Sequence[Run], fit: EpochFit, ax: Axes) -> Axes:
    """A dot for each run, the fitted line, and the critical batch, at which epochs double.

    Args:
        runs: Runs of one recipe.
        fit: Of `asrkit.workbench.cost.fit_epochs`.
        ax: Axes to draw on; returned.
    """
    random = np.random.default_rng(0)
    batch = np.array([run.batch for run in runs], dtype=float)
    moved = batch * random.uniform(1 - JITTER, 1 + JITTER, size=len(batch))
    ax.plot(moved, [run.epochs for run in runs], "o", color=BLUE, ms=4, alpha=0.6, label="a run")
    end = 1.1 * batch.max()
    epochs = [fit.epochs(0), fit.epochs(end)]
    ax.plot([0, end], epochs, color=RED, lw=1.5, label="line through the runs")
    critical = fit.critical_batch
    ax.plot([critical, critical], [0, fit.epochs(critical)], color=GREY, lw=1, ls="--")
    ax.plot([0, critical], [fit.epochs(critical)] * 2, color=GREY, lw=1, ls="--")
    words = f"critical batch {critical:,.0f}:\ntwice the epochs of a small one"
    ax.annotate(words, (critical, 3), (6, 0), textcoords="offset points", fontsize=9)
    ax.set(xlim=(0, end), ylim=(0, None))
    ax.set(xlabel="batch, utterances of a step over all GPUs", ylabel="epochs to the target")
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    return ax


def minutes_over_gpus(
    runs: Sequence[Run],
    epoch_fit: EpochFit,
    step_fit: StepFit,
    gpus: Sequence[int],
    ax: Axes,
    *,
    batches: Sequence[int] = (),
) -> Axes:
    """Minutes to train over the number of GPUs: with the fastest batch, with fixed ones, published.

    Args:
        runs: Published runs on one kind of GPU, drawn as means of those that are alike.
        epoch_fit: Of `asrkit.workbench.cost.fit_epochs`.
        step_fit: Of `asrkit.workbench.cost.fit_steps`.
        gpus: Numbers of GPUs, ascending.
        ax: Axes to draw on; returned.
        batches: Batches whose lines are drawn, as far as each GPU has an utterance.
    """
    for batch, shade in zip(batches, COLOURS[2:], strict=False):
        enough = [number for number in gpus if number <= batch]
        minutes = [predict(number, batch, epoch_fit, step_fit).minutes for number in enough]
        ax.plot(enough, minutes, color=shade, lw=1, ls="--", label=f"a batch of {batch:,}")
    best = [fastest(number, epoch_fit, step_fit).minutes for number in gpus]
    ax.plot(gpus, best, color=RED, lw=2, label="the batch that is fastest")
    groups: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        groups.setdefault((run.gpus, run.batch), []).append(run.minutes)
    named = set[int]()
    for (count, batch), minutes in sorted(groups.items()):
        label = ""
        if not named:  # in the legend once
            label = "published runs, mean, and their batch"
        mean = sum(minutes) / len(minutes)
        ax.plot([count], [mean], "o", color=BLUE, ms=6, label=label)
        offset = (-5, -12)
        if count in named:
            offset = (5, 4)
        named.add(count)
        words = f"{batch:,}"
        ax.annotate(
            words, (count, mean), offset, textcoords="offset points", fontsize=8, color=BLUE
        )
    ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="minutes to train")
    ax.set_xticks(gpus, [f"{number:,}" for number in gpus], rotation=45)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.legend(**LEGEND_BESIDE)
    return ax


ALL_REDUCES = {"ring": RED, "tree": BLUE, "switches": COLOURS[2]}


def all_reduce_over_gpus(
    size: float, gpus: Sequence[int], ax: Axes, *, cluster: Cluster = DGX_A100
) -> Axes:
    """Milliseconds of an all-reduce over the number of GPUs: ring, tree, sums in the switches.

    Args:
        size: Bytes of the vector on each GPU.
        gpus: Numbers of GPUs, ascending.
        ax: Axes to draw on; returned.
        cluster: Their machines and links.
    """
    for algorithm, shade in ALL_REDUCES.items():
        times = [
            1e3 * cluster_all_reduce_s(algorithm, size=size, gpus=number, cluster=cluster)
            for number in gpus
        ]
        ax.plot(gpus, times, "o-", color=shade, ms=4, label=algorithm)
    ax.set(xscale="log", ylim=(0, None), xlabel="GPUs", ylabel="ms of an all-reduce")
    ax.set_xticks(gpus, [f"{number:,}" for number in gpus], rotation=45)
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=8)
    return ax


def flat_shards(sizes: Mapping[str, int], ranks: int, ax: Axes) -> Axes:
    """All parameters end to end in one vector, and where it is cut for the ranks.

    Args:
        sizes: Name of a parameter, or of a layer -> its number of weights.
        ranks: Parts of equal length; the last one may end in padding.
        ax: Axes to draw on; returned.
    """
    total = sum(sizes.values())
    starts = np.cumsum([0, *sizes.values()])
    for number, (name, (start, end)) in enumerate(zip(sizes, pairwise(starts), strict=True)):
        shade = COLOURS[number % len(COLOURS)]
        ax.barh(0, end - start, left=start, height=0.8, color=shade, edgecolor="white", lw=0.5)
        if end - start > total / 40:
            middle = (start + end) / 2
            ax.annotate(name, (middle, 0.55), rotation=40, fontsize=8)
    part = -(-total // ranks)
    for rank in range(ranks):
        ax.plot([rank * part] * 2, [-0.6, 0.5], color="black", lw=1)
        middle = (rank + 0.5) * part
        ax.annotate(f"rank {rank}", (middle, -0.75), ha="center", fontsize=8)
    ax.plot([ranks * part] * 2, [-0.6, 0.5], color="black", lw=1)
    ax.spines["left"].set_visible(False)
    ax.set(yticks=[], ylim=(-1, 1.9), xlim=(-0.01 * total, 1.01 * ranks * part))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}")
    ax.set_xlabel("weights in the flat vector, millions")
    return ax


def ratios_over_steps(ratios: Mapping[str, Sequence[float]], ax: Axes, *, every: int = 1) -> Axes:
    """LAMB's ratio of each tensor's norm to its update's norm, a line a tensor.

    Args:
        ratios: Name of a tensor -> its ratios, in the order of steps. The palette gives a name that
            it knows its colour.
        ax: Axes to draw on; returned.
        every: Steps from one ratio to the next.
    """
    for (name, values), other in zip(ratios.items(), COLOURS, strict=False):
        shade = other
        if name in ("encoder", "predictor", "joint"):
            shade = colour(name)
        steps = every * np.arange(1, len(values) + 1)
        ax.plot(steps, values, color=shade, lw=1.2, label=name)
    ax.set(yscale="log", xlabel="step", ylabel="norm of weights / norm of update")
    ax.legend(**LEGEND_BESIDE)
    return ax
