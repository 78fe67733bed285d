"""Training on many GPUs: epochs over the batch, and minutes over the number of GPUs."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.cost import EpochFit, Run, StepFit, fastest, predict
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import BLUE, COLOURS, GREY, RED

JITTER = 0.02  # of the batch, so that runs of equal epochs do not hide each other


def epochs_and_critical_batch(runs: Sequence[Run], fit: EpochFit, ax: Axes) -> Axes:
    """A dot for each run, the fitted line, and the critical batch, at which epochs double.

    Args:
        runs: Runs of one recipe.
        fit: Of `asrkit.workbench.cost.fit_epochs`.
        ax: Axes to draw on; returned.
    """
    batch = np.array([run.batch for run in runs])
    moved = batch * np.random.default_rng(0).uniform(1 - JITTER, 1 + JITTER, size=len(batch))
    ax.plot(moved, [run.epochs for run in runs], "o", color=BLUE, ms=4, alpha=0.6, label="a run")
    end = 1.1 * batch.max()
    ax.plot(
        [0, end], [fit.epochs(0), fit.epochs(end)], color=RED, lw=1.5, label="line through the runs"
    )
    critical = fit.critical_batch
    twice = fit.epochs(critical)
    ax.plot([critical, critical, 0], [0, twice, twice], color=GREY, lw=1, ls="--")
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
    means = {alike: np.mean(minutes) for alike, minutes in sorted(groups.items())}
    label = "published runs, mean, and their batch"
    ax.plot([count for count, _ in means], [*means.values()], "o", color=BLUE, ms=6, label=label)
    for place, ((count, batch), mean) in enumerate(means.items()):
        beside = (5, 4) if place % 2 else (-5, -12)
        ax.annotate(f"{batch:,}", (count, mean), beside, textcoords="offset points", fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="minutes to train")
    ax.set_xticks(gpus, [f"{number:,}" for number in gpus], rotation=45)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.legend(**LEGEND_BESIDE)
    return ax
