"""How the lean loss cuts a lattice into tiles, and what of a tile stays in registers."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from asrkit.workbench.plots.palette import BLUE, BROWN, GREEN, GREY, RED

BLOCKS = (  # left, bottom, width, height, colour, words
    (0, 0, 3, 4, BLUE, "H of the tile\n128 nodes x D\nin L2"),
    (3.5, 4.5, 8.3, 3, "white", ""),
    (5.2, 4.5, 2.6, 3, BROWN, "chunk of W\nD x 128"),
    (5.2, 0, 2.6, 4, GREEN, "128 x 128\nlogits in\nregisters"),
    (9, 0, 2.8, 4, RED, "of each node:\nlargest, sum,\nblank, label"),
)
ARROWS = (  # start, end
    ((3, 2), (5.2, 2)),
    ((7.8, 2), (9, 2)),
    ((9, 7.9), (11.8, 7.9)),
)


def lean_tile(
    frames: int, labels: int, tile: tuple[int, int], axes: Sequence[Axes]
) -> Sequence[Axes]:
    """A lattice cut into tiles, one of them marked; and beside it the product of that tile.

    Args:
        frames: Frames of the lattice.
        labels: Label rows of the lattice.
        tile: Frames and label rows of a tile.
        axes: Two Axes to draw on; returned.
    """
    _draw_tiles(frames, labels, tile, axes[0])
    _draw_product(axes[1])
    return axes


def _draw_tiles(frames: int, labels: int, tile: tuple[int, int], ax: Axes) -> None:
    tile_frames, tile_labels = tile
    for t in range(0, frames, tile_frames):
        for u in range(0, labels, tile_labels):
            colour = "white"
            if (t, u) == tile:  # the second in both directions
                colour = BLUE
            patch = Rectangle(
                (t, u),
                min(tile_frames, frames - t),
                min(tile_labels, labels - u),
                facecolor=colour,
                edgecolor=GREY,
                alpha=0.8,
            )
            ax.add_patch(patch)
    ax.set(xlim=(0, frames), ylim=(0, labels), xlabel="frame t", ylabel="labels so far, u")


def _draw_product(ax: Axes) -> None:
    for left, bottom, width, height, colour, words in BLOCKS:
        patch = Rectangle(
            (left, bottom),
            width,
            height,
            facecolor=colour,
            edgecolor=GREY,
            alpha=0.5,
        )
        ax.add_patch(patch)
        x = left + width / 2
        y = bottom + height / 2
        ax.text(x, y, words, ha="center", va="center", fontsize=8)
    for start, end in ARROWS:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY})
    ax.text(3.5, 7.9, "V outputs, chunk by chunk", fontsize=8, va="center")
    ax.set(xlim=(-0.2, 12), ylim=(-0.2, 8.3))
    ax.axis("off")
