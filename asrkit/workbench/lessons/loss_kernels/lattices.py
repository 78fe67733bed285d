"""Nodes and arcs of a transducer lattice: paths, diagonals, and the longer arcs of TDT."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from asrkit.workbench.plots.palette import BLUE, GREEN, GREY, PALE_GREY, RED

ARROW = {"arrowstyle": "->", "lw": 1.3}
FRAMES = "encoder frame t"
LABELS = "labels emitted so far, u"


def arcs(words: Sequence[str], frames: int, path: str, ax: Axes) -> Axes:
    """A small lattice with all its arcs, and one path through it.

    Args:
        words: Labels of the rows, U of them.
        frames: T.
        path: One character an arc of the path that is drawn: "b" for blank, "y" for a label.
        ax: Axes to draw on; returned.
    """
    U = len(words)
    for t in range(frames):
        for u in range(U + 1):
            if t + 1 < frames:
                _arrow(ax, (t, u), (t + 1, u), PALE_GREY, 1.3)
            if u < U:
                _arrow(ax, (t, u), (t, u + 1), PALE_GREY, 1.3)
    place = (0, 0)
    for arc in path:
        t, u = place
        end = (t, u + 1)
        name = words[min(u, U - 1)]
        shade = GREEN
        if arc == "b":
            end = (t + 1, u)
            name = "blank"
            shade = BLUE
        _arrow(ax, place, end, shade, 3.0)
        middle = ((t + end[0]) / 2, (u + end[1]) / 2)
        ax.annotate(name, middle, (4, 4), textcoords="offset points", color=shade, fontsize=9)
        place = end
    nodes = np.meshgrid(np.arange(frames), np.arange(U + 1), indexing="ij")
    ax.scatter(*nodes, s=70, color=GREY, zorder=3)
    ax.set(xlabel=FRAMES, ylabel=LABELS, xlim=(-0.4, frames + 0.4), ylim=(-0.4, U + 0.5))
    ax.set_xticks(range(frames))
    ax.set_yticks(range(U + 1), ["∅", *words])
    return ax


def _arrow(
    ax: Axes, start: tuple[int, int], end: tuple[int, int], shade: str, width: float
) -> None:
    style = {"arrowstyle": "->", "lw": width, "color": shade, "shrinkA": 5, "shrinkB": 5}
    ax.annotate("", end, start, arrowprops=style)


def diagonal(k: int, frames: int, rows: int, ax: Axes) -> Axes:
    """The nodes of a lattice with their steps; those of step k are ringed, with what they need.

    Args:
        k: Step, t + u.
        frames: T.
        rows: U1.
        ax: Axes to draw on; returned.
    """
    t, u = (axis.ravel() for axis in np.meshgrid(np.arange(frames), np.arange(rows)))
    now = t + u == k
    done = t + u < k
    ax.scatter(t[~done], u[~done], s=330, color=PALE_GREY, alpha=0.5, lw=0)
    ax.scatter(t[done], u[done], s=330, color=BLUE, alpha=0.35, lw=0)
    ax.scatter(t[now], u[now], s=330, facecolors="none", edgecolors=RED, lw=2)
    for x, y in zip(t.tolist(), u.tolist(), strict=True):
        ax.text(x, y, str(x + y), ha="center", va="center", fontsize=9)
    arrow = {**ARROW, "shrinkA": 8, "shrinkB": 9}
    for x, y in zip(t[now].tolist(), u[now].tolist(), strict=True):
        if x > 0:
            ax.annotate("", (x, y), (x - 1, y), arrowprops=arrow)
        if y > 0:
            ax.annotate("", (x, y), (x, y - 1), arrowprops=arrow)
    ax.set(xlabel=FRAMES, ylabel=LABELS, xlim=(-0.6, frames - 0.4), ylim=(-0.6, rows - 0.4))
    return ax


def nodes_at_once(frames: int, rows: int) -> np.ndarray:
    """Nodes on each anti-diagonal of a lattice, (T + U1 - 1,).

    Args:
        frames: T.
        rows: U1.
    """
    step = np.arange(frames + rows - 1)
    plateau = np.full_like(step, min(frames, rows))
    return np.minimum(np.minimum(step + 1, plateau), frames + rows - 1 - step)


def tdt_arcs(durations: Sequence[int], ax: Axes) -> Axes:
    """The arcs that leave one node of a TDT lattice, those of RNN-T pale below them.

    Args:
        durations: Frames that a token may advance.
        ax: Axes to draw on; returned.
    """
    longest = max(durations)
    t, u = np.meshgrid(np.arange(longest + 3), np.arange(4), indexing="ij")
    ax.scatter(t, u, s=40, color=PALE_GREY, zorder=1)
    for end in ((2, 1), (1, 2)):
        pale = {"arrowstyle": "-", "lw": 7, "alpha": 0.25, "color": GREY}
        ax.annotate("", end, (1, 1), arrowprops=pale)
    ax.plot([], [], color=GREY, lw=7, alpha=0.25, label="RNN-T")
    for name, shade, row in (("TDT blank", BLUE, 1), ("TDT label", GREEN, 2)):
        allowed = [d for d in durations if d > 0 or row == 2]
        ax.plot([], [], color=shade, label=f"{name}, d = {', '.join(map(str, allowed))}")
        for d in allowed:
            bend = 0.1 * (d - 1) if row == 1 else 0.0
            style = {**ARROW, "color": shade, "connectionstyle": f"arc3,rad={bend}"}
            ax.annotate("", (1 + d, row), (1, 1), arrowprops=style)
    ax.set(xlabel=FRAMES, ylabel=LABELS, xlim=(-0.5, longest + 2.5), ylim=(-0.5, 4))
    ax.set_yticks(range(4))
    ax.legend(frameon=False, loc="upper left", fontsize=8, ncols=3)
    return ax
