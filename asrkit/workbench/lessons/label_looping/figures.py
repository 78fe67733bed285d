"""Pictures of batched decoding: who works and who waits, and how pointers jump over blanks."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from asrkit.workbench.plots.palette import BLUE, GREY, colour, fading

# Pixels are the same in both schemes, so that "finished" lets the page through.
FAINT = "#80808026"
MOST_TICKS = 16  # names of frames that have room side by side
STATES = {"working": colour("useful"), "waiting": colour("waiting"), "finished": FAINT}


def waiting(states: np.ndarray, ax: Axes, *, calls: int | None = None) -> Axes:
    """A row an utterance, a column a call of the joint, coloured by what the utterance does.

    Args:
        states: (B, calls) of 0 working, 1 waiting, 2 finished.
        ax: Axes to draw on; returned.
        calls: Where the axis ends, so that several pictures share one scale.
    """
    shades = ListedColormap(list(STATES.values()))
    ax.imshow(states, cmap=shades, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    B = len(states)
    ticks = range(0, B, max(1, -(-B // 4)))
    ax.set(ylabel="utterance", xlim=(-0.5, (calls or states.shape[1]) - 0.5), yticks=ticks)
    return ax


def waiting_legend(ax: Axes) -> Axes:
    """The legend of `waiting`, below `ax`; returned."""
    for name, shade in STATES.items():
        ax.scatter([], [], color=shade, marker="s", label=name)
    ax.legend(frameon=False, fontsize=9, ncols=3, loc="upper right", bbox_to_anchor=(1, -0.12))
    return ax


def waits_matrix(shares: np.ndarray, ax: Axes) -> Axes:
    """Who waits (rows) for whom (columns), with the numbers of calls where they fit.

    Args:
        shares: (B, B), calls of row b spent waiting for column c.
        ax: Axes to draw on; returned.
    """
    B = len(shares)
    ax.imshow(shares, cmap=fading(STATES["waiting"]), vmin=0, vmax=1.5 * max(1e-9, shares.max()))
    if B <= 20:
        for (row, column), share in np.ndenumerate(shares.round().astype(int)):
            if share:
                ax.text(column, row, share, ha="center", va="center", fontsize=min(8, 80 / B))
    ticks = range(0, B, -(-B // 12))
    ax.set(xlabel="works", ylabel="waits", xticks=ticks, yticks=ticks)
    return ax


def pointer_jumping(is_blank: Sequence[bool], names: Sequence[str], ax: Axes) -> Axes:
    """Rounds of pointer jumping over one window: a row a round, an arrow a frame.

    The arrows of the first frame, which are those that count, are blue.

    Args:
        is_blank: Whether the best token of each frame is blank.
        names: What to write below each frame.
        ax: Axes to draw on; returned.
    """
    W = len(is_blank)
    hop = np.arange(W) + np.asarray(is_blank, dtype=np.int64)
    rounds = (W - 1).bit_length()
    for done in range(rounds + 1):
        for frame, target in enumerate(hop.tolist()):
            shade = BLUE if frame == 0 else GREY
            ax.plot(frame, -done, "o", color=shade, ms=4)
            if target > frame:
                arrow = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.25", "color": shade}
                ax.annotate("", (target, -done), (frame, -done), arrowprops=arrow)
        hop = np.append(hop, W)[hop]  # follow two arrows at once
    shown = _named_frames(is_blank)
    ticks = [*names, "beyond"]
    labels = ["one blank each", *(f"after round {done}" for done in range(1, rounds + 1))]
    ax.set_yticks([-done for done in range(rounds + 1)], labels)
    ax.set_xticks(shown, [ticks[frame] for frame in shown], fontsize=8)
    ax.set(xlabel="encoder frame, and the best token there", ylim=(-rounds - 0.4, 0.7))
    return ax


def _named_frames(is_blank: Sequence[bool]) -> list[int]:
    """Frames whose names have room: those of labels, what is beyond, and blanks between them."""
    W = len(is_blank)
    step = -(-W // MOST_TICKS)
    named = [frame for frame in range(W) if not is_blank[frame]] + [W]
    for frame in range(0, W, step):
        if all(abs(frame - other) >= step for other in named):
            named.append(frame)
    return sorted(named)
