"""Notebook 06: the rows of the joint that a greedy decoder computes, and who waits in each call.

A decoder uses only `blank`, `durations`, `predict` and `join` of a model, so an object with these
four can wrap the model and record the calls. Two extra channels of the frames have the numbers of
the utterance and of the frame, and an extra channel of the predictor's output has the number of
labels so far. From them, each row of the joint is identified as a step of an utterance.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from torch import Tensor

from asrkit.decoders import transducer_greedy
from asrkit.workbench.plots import colour

Step = tuple[int, int, int]  # utterance, frame, labels so far
WORKING = 0
WAITING = 1
FINISHED = 2
# Pixels do not follow the colour scheme, so "finished" is almost transparent.
SHADES = {"working": colour("useful"), "waiting": colour("waiting"), "finished": "#80808026"}


class Watched:
    """Wraps a model and records the calls of one decode.

    `joint_calls[call][utterance]` is the list of steps that were computed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.blank: int = model.blank
        self.durations: Sequence[int] = model.durations
        self.joint_calls: list[list[list[Step]]] = []
        self.predictor_calls = 0

    def predict(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The model's predictor, with the number of labels so far in an extra channel."""
        self.predictor_calls += 1
        inner, count = state or (None, torch.full((len(labels), 1), -1.0))
        predicted, inner = self.model.predict(labels, inner)
        return torch.cat([predicted, count + 1], 1), (inner, count + 1)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """The model's joint, without the extra channels."""
        counts = predicted[..., -1:].expand(*encoded.shape[:-1], 1)
        steps = torch.cat([encoded[..., -2:], counts], -1)
        by_utterance = steps.view(len(steps), -1, 3).int().tolist()
        self.joint_calls.append([[tuple(step) for step in row] for row in by_utterance])
        return self.model.join(encoded[..., :-2], predicted[..., :-1])

    @property
    def rows(self) -> int:
        """Number of rows of the joint; a row is one utterance at one frame."""
        return sum(len(steps) for call in self.joint_calls for steps in call)

    @property
    def steps(self) -> set[Step]:
        """All steps that were computed."""
        return {step for call in self.joint_calls for steps in call for step in steps}


def watch(model: Any, encoded: Tensor, lengths: Tensor, **options: Any) -> Watched:
    """Decode a batch on the CPU, and record every call of the joint and of the predictor.

    Args:
        model: A transducer.
        encoded: Frames of the encoder, (B, T, D).
        lengths: Number of frames of each utterance, (B,).
        options: Options of `transducer_greedy`, such as strategy="label_looping".
    """
    watched = Watched(model)
    ranges = [torch.arange(size) for size in encoded.shape[:2]]
    indices = torch.stack(torch.meshgrid(*ranges, indexing="ij"), -1)
    transducer_greedy(watched, torch.cat([encoded, indices], -1), lengths, **options)
    return watched


def states(watched: Watched, path: set[Step]) -> np.ndarray:
    """The state of each utterance in each call of the joint: WORKING, WAITING or FINISHED.

    An utterance works in a call that computes a new step of its path; otherwise it waits. It has
    finished when no step of its path remains.

    Args:
        watched: A decode of the whole batch.
        path: The steps of all paths, which decoding one by one computes.

    Returns:
        States, (B, calls).
    """
    B = len(watched.joint_calls[0])
    state = np.full((B, len(watched.joint_calls)), WAITING, dtype=np.int64)
    for b in range(B):
        remaining = {step for step in path if step[0] == b}
        for number, call in enumerate(watched.joint_calls):
            new_steps = remaining.intersection(call[b])
            if not remaining:
                state[b, number] = FINISHED
            elif new_steps:
                state[b, number] = WORKING
            remaining -= new_steps
    return state


def waiting_share(states: np.ndarray) -> float:
    """Share of waiting in the calls of all utterances until they finish; `states` is (B, calls)."""
    return float((states == WAITING).sum() / (states != FINISHED).sum())


def waits_for(states: np.ndarray) -> np.ndarray:
    """Calls (B, B) that one utterance (row) waits for another one (column) to work.

    A call in which an utterance waits is divided equally among those that work in it.

    Args:
        states: States, (B, calls).
    """
    works = (states == WORKING).astype(float)
    waits = (states == WAITING).astype(float)
    return waits @ (works / works.sum(0).clip(1)).T


def waiting(states: np.ndarray, ax: Axes, *, calls: int) -> Axes:
    """Draw a row for each utterance and a column for each call of the joint, coloured by state.

    Args:
        states: States, (B, calls).
        ax: Axes to draw on; returned.
        calls: End of the axis, so that several pictures share one scale.
    """
    shades = ListedColormap(list(SHADES.values()))
    ax.imshow(states, cmap=shades, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    B = len(states)
    ax.set(ylabel="utterance", xlim=(-0.5, calls - 0.5), yticks=range(0, B, -(-B // 4)))
    return ax
