"""Pictures: data in, matplotlib Axes out. No global style, nothing saved; `show` puts one on a page
with its alt text.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from asrkit.shapes import expect
from asrkit.workbench.cost import Range, TranscriptionCost, transcription_cost

COLOURS = (
    "#1f6feb",
    "#d1242f",
    "#1a7f37",
    "#9a6700",
    "#8250df",
    "#57606a",
)  # one an implementation, in order
UNITS = {"core": "cores", "gpu": "GPUs"}


def canvas(
    title: str, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.5, 3.2)
) -> tuple[Figure, Axes | np.ndarray]:
    """A figure and its Axes, detached from pyplot's state; the title is the one claim the picture
    makes.
    """
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure, axes


def _png(figure: Figure, alt: str) -> str:
    expect(len(alt.split()) >= 4, "alt", "a sentence that says what the picture shows", repr(alt))
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return base64.b64encode(out.getvalue()).decode()


def _img(png: str, alt: str) -> str:
    import html

    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}">'


def show(figure: Figure, alt: str) -> None:
    """Display `figure` with its alt text: the only way notebooks show pictures. JupyterLab takes
    the words from the HTML only.
    """
    from IPython.display import display

    png = _png(figure, alt)
    data = {"text/html": _img(png, alt), "image/png": png, "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})


def as_html(figure: Figure, alt: str) -> str:
    """`<img>` with the picture inside, for `ipywidgets.HTML`: what widgets draw into."""
    return _img(_png(figure, alt), alt)


def waveform(samples: Tensor, rate_hz: int, ax: Axes) -> Axes:
    """Samples (S,) over seconds."""
    ax.plot(np.arange(len(samples)) / rate_hz, samples.numpy(), lw=0.5, color=COLOURS[0])
    ax.set(xlabel="time, s", ylabel="amplitude", xlim=(0, len(samples) / rate_hz))
    return ax


def spectrogram(features: Tensor, hop_s: float, ax: Axes) -> Axes:
    """Features (T, F) as a picture, time to the right, frequency up."""
    ax.imshow(
        features.T.numpy(),
        origin="lower",
        aspect="auto",
        extent=(0, len(features) * hop_s, 0, features.shape[1]),
    )
    ax.set(xlabel="time, s", ylabel="mel bin")
    return ax


def training_curve(history: Sequence[Mapping[str, float]], ax: Axes) -> Axes:
    """Loss per label (nats) over seconds of training: every step thin, a running median thick."""
    seconds, loss = np.array([[line["seconds"], line["loss"]] for line in history]).T
    half = max(1, len(loss) // 40)
    middle = [np.median(loss[max(0, i - half) : i + half + 1]) for i in range(len(loss))]
    ax.plot(seconds, loss, lw=0.5, alpha=0.5, color=COLOURS[0], label="each step")
    ax.plot(seconds, middle, lw=2, color=COLOURS[0], label="running median")
    ax.set(xlabel="training time, s", ylabel="loss, nats per label", yscale="log")
    ax.legend(frameon=False)
    return ax


def lattice(
    values: Tensor,
    labels: Sequence[str],
    ax: Axes,
    *,
    path: Sequence[tuple[int, int]] = (),
    caption: str = "",
) -> Axes:
    """A value a cell (T, U1) of the transducer lattice, frames to the right, labels up, with an
    optional path of (t, u).
    """
    T, U1 = values.shape
    expect(len(labels) == U1 - 1, "labels", f"{U1 - 1}, one less than rows", len(labels))
    image = ax.imshow(values.T.numpy(), origin="lower", aspect="auto", cmap="Blues")
    if path:
        frames, rows = zip(*path, strict=True)
        ax.plot(frames, rows, color=COLOURS[1], lw=1.5, marker="o", ms=3, label="greedy path")
        ax.legend(frameon=False, loc="upper left")
    ax.set_yticks(range(U1), ["∅", *("␣" if label == " " else label for label in labels)])
    ax.set(xlabel="encoder frame t", ylabel="labels emitted so far, u")
    ax.figure.colorbar(image, ax=ax, label=caption)
    return ax


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    ax: Axes,
    *,
    measured: Mapping[str, float] | None = None,
    unit: str = "",
) -> Axes:
    """A horizontal bar a row, made of its named parts; measured totals as diamonds."""
    names = list(
        dict.fromkeys(part for parts in rows.values() for part, size in parts.items() if size)
    )
    shades = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    left = np.zeros(len(rows))
    for name, shade in zip(names, shades, strict=False):
        widths = np.array([parts.get(name, 0) for parts in rows.values()], dtype=float)
        ax.barh(list(rows), widths, left=left, color=shade, label=name)
        left += widths
    if measured:
        ax.plot(list(measured.values()), list(measured), "D", color="black", ms=5, label="measured")
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def lean_tile(
    frames: int, labels: int, tile: tuple[int, int], axes: Sequence[Axes]
) -> Sequence[Axes]:
    """A lattice of frames x labels cut into tiles of (frames, labels); and one tile's product, with
    what stays in registers.
    """
    wide, high = tile
    for t in range(0, frames, wide):
        for u in range(0, labels, high):
            shade = COLOURS[0] if (t, u) == (wide, high) else "white"
            size = min(wide, frames - t), min(high, labels - u)
            axes[0].add_patch(
                Rectangle((t, u), *size, facecolor=shade, edgecolor=COLOURS[5], alpha=0.8)
            )
    axes[0].set(xlim=(0, frames), ylim=(0, labels), xlabel="frame t", ylabel="labels so far, u")
    blocks = [  # left, bottom, width, height, colour, words
        (0, 0, 3, 4, COLOURS[0], "H of the tile\n128 nodes x D\nin L2"),
        (3.5, 4.5, 8.3, 3, "white", ""),
        (5.2, 4.5, 2.6, 3, COLOURS[3], "chunk of W\nD x 128"),
        (5.2, 0, 2.6, 4, COLOURS[2], "128 x 128\nlogits in\nregisters"),
        (9, 0, 2.8, 4, COLOURS[1], "of each node:\nlargest, sum,\nblank, label"),
    ]
    for left, bottom, width, height, colour, words in blocks:
        axes[1].add_patch(
            Rectangle(
                (left, bottom), width, height, facecolor=colour, edgecolor=COLOURS[5], alpha=0.5
            )
        )
        axes[1].text(
            left + width / 2, bottom + height / 2, words, ha="center", va="center", fontsize=8
        )
    for start, end in (((3, 2), (5.2, 2)), ((7.8, 2), (9, 2)), ((9, 7.9), (11.8, 7.9))):
        axes[1].annotate("", end, start, arrowprops={"arrowstyle": "->", "color": COLOURS[5]})
    axes[1].text(3.5, 7.9, "V outputs, chunk by chunk", fontsize=8, va="center")
    axes[1].set(xlim=(-0.2, 12), ylim=(-0.2, 8.3))
    axes[1].axis("off")
    return axes


def lengths(seconds: np.ndarray, tokens: np.ndarray, axes: Sequence[Axes]) -> Sequence[Axes]:
    """Utterances (N,) by seconds, by tokens per second, and both at once, brighter where more are;
    one Axes: the first only.
    """
    axes[0].hist(seconds, bins=60, color=COLOURS[0])
    axes[0].set(xlabel="length, s", ylabel="utterances")
    if len(axes) > 1:
        rates = tokens / seconds
        axes[1].hist(
            np.minimum(rates, np.quantile(rates, 0.999)), bins=60, color=COLOURS[2]
        )  # the fastest in the last bar
        axes[1].set(xlabel="tokens per second", ylabel="utterances")
        axes[2].hexbin(
            seconds, tokens, gridsize=40, bins="log", mincnt=1, cmap="viridis", linewidths=0.1
        )
        axes[2].set(xlabel="length, s", ylabel="tokens")
    return axes


def timeline(
    rows: Mapping[str, Sequence[tuple[str, float]]], ax: Axes, *, unit: str = "ms"
) -> Axes:
    """A row of (name, length) parts end to end in their order: what comes before what, a colour a
    name.
    """
    names = list(dict.fromkeys(name for parts in rows.values() for name, _ in parts))
    shades = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    expect(len(names) <= len(shades), "rows", f"at most {len(shades)} different names", len(names))
    for row, parts in enumerate(rows.values()):
        starts = np.cumsum([0, *(length for _, length in parts)])
        for name, shade in zip(names, shades, strict=False):
            spans = [
                (start, length)
                for start, (part, length) in zip(starts, parts, strict=False)
                if part == name
            ]
            ax.broken_barh(
                spans,
                (row - 0.4, 0.8),
                facecolor=shade,
                edgecolor="white",
                lw=0.3,
                label="" if row else name,
            )
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlabel(f"time, {unit}")
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def padded_batches(batches: Sequence[np.ndarray], ax: Axes, *, unit: str = "length, s") -> Axes:
    """A bar an utterance, batch after batch: dark its own length, pale the padding up to the
    longest of its batch.
    """
    starts = np.cumsum([0, *(len(batch) + 2 for batch in batches)])
    for start, batch in zip(starts, batches, strict=False):
        ax.bar(
            start + (len(batch) - 1) / 2,
            max(batch),
            width=len(batch),
            color=COLOURS[1],
            alpha=0.35,
            lw=0,
        )
        ax.bar(start + np.arange(len(batch)), batch, width=1.0, color=COLOURS[0], lw=0)
    ax.set(xlabel="utterances, batch after batch", ylabel=unit, xlim=(-2, starts[-1]))
    return ax


def tornado(
    swings: Mapping[str, tuple[float, float]], middle: float, ax: Axes, *, unit: str = ""
) -> Axes:
    """A bar an input, from the outcome at its lowest to that at its highest, across the outcome in
    the middle; first on top.

    Blue is where the input is lowest, red where it is highest.
    """
    for row, ends in enumerate(swings.values()):
        for end, colour, name in zip(
            ends, COLOURS[:2], ("input at its lowest", "input at its highest"), strict=True
        ):
            ax.barh(
                row, end - middle, left=middle, height=0.6, color=colour, label="" if row else name
            )
    ax.axvline(middle, color="black", lw=0.8)
    ax.set_yticks(range(len(swings)), list(swings))
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def break_even(costs: Sequence[TranscriptionCost], ax: Axes) -> Axes:
    """USD of a million hours over the RTFx of one core or GPU: a line a machine, pale from its
    lowest to its highest price.

    A marker is an RTFx that somebody has seen, with its origin; it is filled where this project
    measured. Two machines cost the same where a level line cuts theirs.
    """
    ends, first = (
        [end for cost in costs for end in cost.speed.rtfx.ends],
        dict[str, TranscriptionCost](),
    )
    for cost in costs:
        first.setdefault(cost.instance.name, cost)
    rtfx, colours = (
        np.geomspace(min(ends) / 3, max(ends) * 3, 100),
        dict(zip(first, COLOURS, strict=False)),
    )
    for name, one in first.items():
        at = (replace(one.speed, rtfx=Range.of(float(x))) for x in rtfx)
        usd = [
            transcription_cost(one.instance, speed, **vars(one.terms)).usd_per_million_hours.ends
            for speed in at
        ]
        low, middle, high = np.transpose(usd)
        ax.plot(
            rtfx,
            middle,
            color=colours[name],
            label=f"{name}, {one.instance.units(one.speed.per)} {UNITS[one.speed.per]}",
        )
        ax.fill_between(rtfx, low, high, color=colours[name], alpha=0.2, lw=0)
    for place, cost in enumerate(
        sorted(costs, key=lambda cost: cost.speed.rtfx.middle)
    ):  # neighbours on either side of their line
        x, y, colour = (
            cost.speed.rtfx.middle,
            cost.usd_per_million_hours.middle,
            colours[cost.instance.name],
        )
        ax.plot(
            x,
            y,
            "o",
            color=colour,
            mfc="white" if cost.speed.origin in ("published", "assumed") else colour,
            zorder=3,
        )
        side = {"xytext": (6, 4)} if place % 2 else {"xytext": (-6, -11), "ha": "right"}
        ax.annotate(
            f"{x:,.4g}, {cost.speed.origin.partition(',')[0]}",
            (x, y),
            textcoords="offset points",
            fontsize=8,
            **side,
        )
    seen = [end for cost in costs for end in cost.usd_per_million_hours.ends]
    ax.set_ylim(min(seen) / 3, max(seen) * 2)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="RTFx of one core or GPU",
        ylabel="USD for a million hours of speech",
    )
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_formatter("{x:,.4g}")
    ax.legend(frameon=False, fontsize=8)
    return ax


def waterfall(
    rates: Mapping[str, float],
    axes: Sequence[Axes],
    *,
    alone: Mapping[str, float],
    limits: Mapping[str, float],
    spread: Mapping[str, tuple[float, float]] | None = None,
    unit: str = "RTFx",
) -> Sequence[Axes]:
    """A bar a rung, from the rate of the one above it to its own: blue where it is faster, red
    where slower; the first is grey.

    In brackets its share of `limits`, the rates that the machine allows. On the second Axes what
    each rung gives: filled on top of those above, with a line over its `spread` where that is
    known, hollow `alone` on the first. The scales are logarithmic: equal gains are equally long.
    """
    names, values = list(rates), np.array([*rates.values()], dtype=float)
    expect(min(values) > 0, "rates", "above 0", rates)
    rows, (left, right), lowest = np.arange(len(values)), axes, values.min() / 1.5
    before = np.concatenate([values[:1], values[:-1]])
    start = np.where(rows == 0, lowest, before)
    colours = [COLOURS[5], *(COLOURS[int(now < then)] for then, now in pairwise(values))]
    left.barh(rows, values - start, left=start, height=0.65, color=colours)
    for row, (name, then, now) in enumerate(zip(names, before, values, strict=True)):
        left.annotate(
            f"{now:,.3g} ({now / limits[name]:.1%})",
            (max(then, now), row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        left.plot([now, now], [row, min(row + 1, len(rows) - 1)], color="black", lw=0.6)
    left.set(
        xscale="log",
        xlabel=f"{unit} (share of what the machine allows)",
        xlim=(lowest, values.max() ** 1.3 / lowest**0.3),
    )
    here = dict(zip(names, values / before, strict=True))
    for label, given, face in (("on those above", here, COLOURS[0]), ("alone", alone, "white")):
        shown = [row for row in rows[1:] if names[row] in given]
        right.plot(
            [given[names[row]] for row in shown],
            shown,
            "o",
            mec=COLOURS[0],
            mfc=face,
            ms=7,
            label=label,
        )
    for name, ends in (spread or {}).items():
        right.plot(ends, [names.index(name)] * 2, color=COLOURS[0], lw=1.5)
    right.axvline(1, color="black", lw=0.8)
    right.set(xscale="log", xlabel="times as fast")
    right.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for ax, labels in ((left, names), (right, [""] * len(names))):
        ax.set_yticks(rows, labels)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        _plain_ticks(ax)
    return axes


def _plain_ticks(ax: Axes) -> None:
    """Ordinary numbers on a logarithmic axis, at least three of them however short it is."""
    low, high = ax.get_xlim()
    for steps in (
        (1,),
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        (1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    ):
        ticks = [
            step * 10.0**power
            for power in range(-4, 8)
            for step in steps
            if low <= step * 10.0**power <= high
        ]
        if len(ticks) >= 3:
            break
    ax.set_xticks(ticks, [f"{tick:,.3g}" for tick in ticks])
    ax.minorticks_off()
