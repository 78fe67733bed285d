"""Loops over utterances against batches: Amdahl's law, CTC's runs, launches, waits and times."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from asrkit.decoders import Hypotheses
from asrkit.workbench.measure import Launches, Timing
from asrkit.workbench.plots.palette import BLUE, COLOURS, RED, fading


def amdahl(faster: float, needed: Mapping[float, float], ax: Axes) -> Axes:
    """Throughput gained over the share of a step that becomes `faster` times as fast.

    Args:
        faster: How many times as fast the step becomes.
        needed: Gain, as 1.1 -> share of the step that it needs: dashed lines.
        ax: Axes to draw on; returned.
    """
    share = np.linspace(0, 0.4, 200)
    gained = 1 / (1 - share + share / faster) - 1
    ax.plot(100 * share, 100 * gained, color=BLUE)
    for gain, share_of_step in needed.items():
        x = 100 * share_of_step
        y = 100 * gain - 100
        ax.plot([0, x, x], [y, y, 0], color=RED, lw=1, ls="--")
    ax.set(xlabel="share of the step before, %", ylabel="throughput gained, %")
    ax.set(xlim=(0, 40), ylim=(0, 30))
    return ax


def ctc_runs(probs: Tensor, symbols: Sequence[str], decoded: Hypotheses, ax: Axes) -> Axes:
    """Probabilities of one utterance, with each label's run underlined in red.

    Args:
        probs: (T, V).
        symbols: What each token is called.
        decoded: What greedy decoding makes of it; its first utterance is drawn.
        ax: Axes to draw on; returned.
    """
    image = ax.imshow(probs.T, cmap=fading(BLUE), aspect="auto")
    runs = zip(decoded.labels[0], decoded.frames[0], decoded.durations[0], strict=True)
    for run in runs:
        label, frame, duration = map(int, run)
        ends = [frame - 0.45, frame + duration - 0.55]
        ax.plot(ends, [label + 0.44] * 2, color=RED, lw=4, solid_capstyle="butt")
        place = (frame + duration / 2 - 0.5, label - 0.62)
        ax.annotate(f"{frame}, {duration}", place, ha="center", fontsize=9, color=RED)
    ax.set_xlabel("encoder frame (red: a run's first frame and number of frames)")
    ax.set_xticks(range(0, len(probs), 2))
    ax.set_ylim(len(symbols) - 0.4, -1.2)
    ax.set_yticks(range(len(symbols)), list(symbols))
    ax.figure.colorbar(image, ax=ax, label="probability")
    return ax


def launches_and_waits(
    profiles: Mapping[str, Sequence[Launches]], sizes: Sequence[int], axes: Sequence[Axes]
) -> Sequence[Axes]:
    """Launches and waits over the batch size, a line for each variant.

    Args:
        profiles: Variant -> what it launches, one for each batch size.
        sizes: Utterances in the batch.
        axes: Two Axes, for launches and for waits; returned.
    """
    left, right = axes
    for shade, (name, counts) in zip(COLOURS, profiles.items(), strict=False):
        launches = [profile.launches for profile in counts]
        waits = [profile.syncs for profile in counts]
        left.plot(sizes, launches, "o-", ms=4, color=shade, label=name)
        right.plot(sizes, waits, "o-", ms=4, color=shade, label=name)
    _over_batch(left, sizes, "launches")
    _over_batch(right, sizes, "waits")
    return axes


def ms_per_utterance(times: Mapping[int, Mapping[str, Timing]], ax: Axes) -> Axes:
    """Milliseconds an utterance over the batch size: medians, and bands over the quartiles.

    Args:
        times: Utterances in the batch -> timings by the name of the arm.
        ax: Axes to draw on; returned.
    """
    sizes = list(times)
    names = list(times[sizes[0]])
    for shade, name in zip(COLOURS, names, strict=False):
        low, middle, high = (
            [times[B][name].percentile_ms(percent) / B for B in sizes] for percent in (25, 50, 75)
        )
        ax.plot(sizes, middle, "o-", ms=4, color=shade, label=name)
        ax.fill_between(sizes, low, high, color=shade, alpha=0.2, lw=0)
    _over_batch(ax, sizes, "ms per utterance (median, quartiles)")
    return ax


def _over_batch(ax: Axes, sizes: Sequence[int], ylabel: str) -> None:
    ax.set(xscale="log", xlabel="utterances in the batch", ylabel=ylabel, ylim=(0, None))
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.legend(frameon=False)


def gain_over_speed(
    rest_ms: float, loops_ms: Mapping[str, float], marks: Sequence[int], ax: Axes
) -> Axes:
    """Throughput that loops cost, in per cent, over the speed-up of all the rest.

    Args:
        rest_ms: Time of all but the loops.
        loops_ms: Loop -> its time.
        marks: Gains in per cent that get a dotted line.
        ax: Axes to draw on; returned.
    """
    faster = np.logspace(0, 3, 200)
    all_loops_ms = sum(loops_ms.values())
    for shade, (loop, ms) in zip(COLOURS, loops_ms.items(), strict=False):
        gained = 100 * ms / (rest_ms / faster + all_loops_ms - ms)
        ax.plot(faster, gained, color=shade, label=f"without the loop of {loop}")
    gained_by_all = 100 * all_loops_ms / (rest_ms / faster)
    ax.plot(faster, gained_by_all, color=COLOURS[len(loops_ms)], label="without both")
    for percent in marks:
        ax.axhline(percent, color="black", lw=0.8, ls=":")
    ax.set(xscale="log", xlabel="speedup of the rest", ylabel="throughput gained, %")
    ax.set(xlim=(1, 1000), ylim=(0, 40))
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax
