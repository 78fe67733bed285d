"""Memory of the joint: over the batch size, and the padding of a batch of lattices."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from torch import Tensor

from asrkit.workbench.plots.palette import BLUE, GREEN, GREY, PALE

STYLES = {4: "-", 2: "--"}  # by bytes of a number
NAMES = {4: "float32", 2: "float16"}


def memory_over_batch(
    curves: Mapping[tuple[int, int], Sequence[float]],
    batches: Sequence[int],
    ax: Axes,
    *,
    capacities: Mapping[str, float],
    title: str = "",
) -> Axes:
    """Gigabytes over the batch size, both logarithmic: a line for each number of labels and format.

    Args:
        curves: (labels, bytes of a number) -> gigabytes, one for each batch size.
        batches: Batch sizes.
        ax: Axes to draw on; returned.
        capacities: Name of a GPU -> its memory in gigabytes, a level line.
        title: Title of these Axes.
    """
    labels = dict.fromkeys(U for U, _ in curves)
    shades = dict(zip(labels, (BLUE, GREEN), strict=False))
    for (U, itemsize), gigabytes in curves.items():
        label = f"U = {U}, {NAMES[itemsize]}"
        ax.plot(batches, gigabytes, STYLES[itemsize], color=shades[U], label=label)
    for name, capacity in capacities.items():
        ax.axhline(capacity, color=GREY, lw=0.7)
        ax.text(batches[0], 1.1 * capacity, name, fontsize=8, color=GREY)
    ax.set(xscale="log", yscale="log", xlabel="B, utterances")
    ax.set_title(title, fontsize=10)
    ax.set_xticks(batches, [str(size) for size in batches])
    ax.minorticks_off()
    return ax


def padded_lattices(frames: Tensor, labels: Tensor, axes: Sequence[Axes]) -> Sequence[Axes]:
    """The padded lattices of a batch, a panel each: blue its own nodes, pale the padding.

    Args:
        frames: Frames of each utterance, (B,).
        labels: Labels of each utterance, (B,).
        axes: One Axes for each utterance; returned.
    """
    longest = int(frames.max())
    most = int(labels.max()) + 1
    for T, U, ax in zip(frames.tolist(), labels.tolist(), axes, strict=True):
        ax.fill_between([0, longest], 0, most, color=PALE, lw=0)
        ax.fill_between([0, T], 0, U + 1, color=BLUE, lw=0)
        ax.set(xlim=(0, longest), ylim=(0, most), xlabel="frame t")
        ax.set_title(f"{T} frames, {U} labels", fontsize=10)
    axes[0].set_ylabel("labels so far, u")
    return axes
