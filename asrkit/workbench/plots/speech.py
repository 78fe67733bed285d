"""Pictures of speech, of a lattice, of training, and of the lengths of a corpus."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from asrkit.shapes import expect
from asrkit.workbench.plots.palette import BLUE, GREEN, RED, fading


def waveform(samples: Tensor, rate_hz: int, ax: Axes) -> Axes:
    """Samples over seconds.

    Args:
        samples: Amplitudes, (S,).
        rate_hz: Samples per second.
        ax: Axes to draw on; returned.
    """
    count = len(samples)
    seconds = np.arange(count) / rate_hz
    ax.plot(seconds, samples.numpy(), lw=0.5, color=BLUE)
    ax.set(
        xlabel="time, s",
        ylabel="amplitude",
        xlim=(0, count / rate_hz),
    )
    return ax


def spectrogram(features: Tensor, hop_s: float, ax: Axes) -> Axes:
    """Features as a picture, time to the right, frequency up.

    Args:
        features: Log-mel features, (T, F).
        hop_s: Seconds from a frame to the next.
        ax: Axes to draw on; returned.
    """
    T, F = features.shape
    extent = (0, T * hop_s, 0, F)
    ax.imshow(features.T.numpy(), origin="lower", aspect="auto", extent=extent)
    ax.set(xlabel="time, s", ylabel="mel bin")
    return ax


def training_curve(history: Sequence[Mapping[str, float]], ax: Axes) -> Axes:
    """Loss over seconds of training: every step thin, a running median thick.

    Args:
        history: Of each step `seconds` and `loss` in nats per label.
        ax: Axes to draw on; returned.
    """
    seconds = np.array([step["seconds"] for step in history])
    loss = np.array([step["loss"] for step in history])
    steps = len(loss)
    half = max(1, steps // 40)
    medians = []
    for step in range(steps):
        first = max(0, step - half)
        window = loss[first : step + half + 1]
        medians.append(np.median(window))
    ax.plot(seconds, loss, lw=0.5, alpha=0.5, color=BLUE, label="each step")
    ax.plot(seconds, medians, lw=2, color=BLUE, label="running median")
    ax.set(
        xlabel="training time, s",
        ylabel="loss, nats per label",
        yscale="log",
    )
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
    """Values of the nodes of a transducer lattice, frames to the right, labels up.

    Args:
        values: One value a node, (T, U1).
        labels: The U labels of the rows above the first.
        ax: Axes to draw on; returned.
        path: Nodes (t, u) of a path to draw.
        caption: What the colours mean.
    """
    _, U1 = values.shape
    expect(len(labels) == U1 - 1, "labels", f"{U1 - 1}, one less than rows", len(labels))
    image = ax.imshow(values.T.numpy(), origin="lower", aspect="auto", cmap=fading(BLUE))
    if path:
        frames = [t for t, _ in path]
        rows = [u for _, u in path]
        ax.plot(frames, rows, color=RED, lw=1.5, marker="o", ms=3, label="greedy path")
        ax.legend(frameon=False, loc="upper left")
    names = ["∅"]
    for label in labels:
        if label == " ":
            label = "␣"
        names.append(label)
    ax.set_yticks(range(U1), names)
    ax.set(xlabel="encoder frame t", ylabel="labels emitted so far, u")
    ax.figure.colorbar(image, ax=ax, label=caption)
    return ax


def lengths(seconds: np.ndarray, tokens: np.ndarray, axes: Sequence[Axes]) -> Sequence[Axes]:
    """Utterances by seconds, by tokens per second, and by both, brighter where there are more.

    Args:
        seconds: Length of each utterance, (N,).
        tokens: Tokens of each utterance, (N,).
        axes: Three Axes to draw on, or one for the seconds only; returned.
    """
    axes[0].hist(seconds, bins=60, color=BLUE)
    axes[0].set(xlabel="length, s", ylabel="utterances")
    if len(axes) == 1:
        return axes
    rates = tokens / seconds
    fastest = np.quantile(rates, 0.999)  # those beyond it are in the last bar
    axes[1].hist(np.minimum(rates, fastest), bins=60, color=GREEN)
    axes[1].set(xlabel="tokens per second", ylabel="utterances")
    axes[2].hexbin(
        seconds, tokens, gridsize=40, bins="log", mincnt=1, cmap="viridis", linewidths=0.1
    )
    axes[2].set(xlabel="length, s", ylabel="tokens")
    return axes
