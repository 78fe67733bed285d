"""The transducer loss: its time, its memory, its rounding, and when labels are emitted."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from asrkit.workbench.measure import Timing
from asrkit.workbench.plots.palette import COLOURS, RED, colour
from asrkit.workbench.plots.speech import lattice

MIB = 2**20


def time_over_memory(
    times: Mapping[str, Timing], peaks_B: Mapping[str, int], ax: Axes, *, ylabel: str
) -> Axes:
    """A point for each arm: its median time, with quartiles, over its peak memory.

    Args:
        times: Timings by the name of the arm.
        peaks_B: Peak memory of the same arms, in bytes.
        ax: Axes to draw on; returned.
        ylabel: What the times are of, with their unit.
    """
    for name, timing in times.items():
        shade = colour(name)
        ms = timing.median_ms
        mib = peaks_B[name] / MIB
        spread = [[ms - timing.percentile_ms(25)], [timing.percentile_ms(75) - ms]]
        ax.errorbar(mib, ms, yerr=spread, fmt="o", color=shade, capsize=3)
        offset = (6, 5)
        side = "left"
        if name.endswith("_overwrite"):  # its neighbour has the space to the right
            offset = (-6, 5)
            side = "right"
        ax.annotate(name, (mib, ms), offset, textcoords="offset points", ha=side, fontsize=9)
    most_mib = max(peaks_B.values()) / MIB
    ax.set(xlabel="peak memory, MiB", ylabel=ylabel, xlim=(0, 1.2 * most_mib), ylim=(0, None))
    return ax


def rounding_error_lines(errors: pd.DataFrame, axes: Sequence[Axes]) -> Sequence[Axes]:
    """Relative errors over frames, of the loss and of the gradient, both axes logarithmic.

    Args:
        errors: Columns T, format, sums ("float64" or "in the format"), loss and gradient.
        axes: Two Axes, for the loss and for the gradient; returned.
    """
    for ax, part in zip(axes, ("loss", "gradient"), strict=True):
        for (name, sums), line in errors.groupby(["format", "sums"], sort=False):
            dash = "--"
            label = f"sums in {name}"
            if sums == "float64":
                dash = "-"
                label = f"{name} logits, float64 sums"
            shade = colour(name)
            ax.plot(line["T"], line[part], dash, color=shade, marker="o", ms=3, label=label)
        ax.set(
            xscale="log", yscale="log", xlabel="frames T", ylabel=f"relative error of the {part}"
        )
        frames = errors["T"].unique()
        ax.set_xticks(frames, frames, minor=False)
        ax.minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    return axes


def emissions(
    posteriors: Mapping[float, Tensor],
    expected: Mapping[float, Tensor],
    words: Sequence[str],
    axes: Sequence[Axes],
) -> Sequence[Axes]:
    """Posteriors of label arcs for several strengths of FastEmit, a lattice each.

    Dots are the expected frames of the labels, crosses those without FastEmit.

    Args:
        posteriors: Strength -> (T, U); 0 is among them.
        expected: Strength -> expected frame of each label, (U,).
        words: The labels, bottom to top.
        axes: One Axes for each strength; returned.
    """
    label_rows = range(len(words))
    for ax, (strength, posterior) in zip(axes, posteriors.items(), strict=True):
        with_last_row = torch.nn.functional.pad(posterior, (0, 1))
        lattice(with_last_row, words, ax, caption="posterior of the label arc")
        ax.plot(expected[strength], label_rows, "o", color=RED, ms=4, label="expected frame")
        ax.plot(expected[0.0], label_rows, "x", color="black", ms=5, label="without FastEmit")
        ax.legend(frameon=False, fontsize=8, loc="upper left")
        ax.set_title(f"λ = {strength}", fontsize=10)
    return axes


def tokens_over_penalty(
    tokens: Mapping[int, Sequence[float]], sigmas: Sequence[float], T: int, U: int, ax: Axes
) -> Axes:
    """Expected tokens of a TDT alignment over the penalty for each token.

    Args:
        tokens: Longest duration -> expected tokens, one for each sigma.
        sigmas: Penalties, in nats a token.
        T: Frames.
        U: Labels.
        ax: Axes to draw on; returned.
    """
    for shade, (longest, counts) in zip(COLOURS, tokens.items(), strict=False):
        ax.plot(sigmas, counts, "o-", ms=3, color=shade, label=f"durations 0 to {longest}")
    fewest = max(tokens)
    ax.axhline(T + U, color="black", lw=1, ls="--", label="RNN-T: T + U")
    ax.axhline(T / fewest, color="black", lw=1, ls=":", label=f"T / {fewest}")
    most = np.ceil(1.375 * (T + U))  # room for the legend
    ax.set(xscale="log", xlabel="σ, nats a token", ylim=(0, most))
    ax.set_ylabel(f"tokens, T = {T}, U = {U}")
    ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
    return ax
