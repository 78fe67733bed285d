"""Notebook 06: the rows of the joint that a greedy decoder computes, and who waits in each call.

A decoder needs only `blank`, `durations`, `predict` and `join` of a model. So an object with these
four can stand between decoder and model and note the calls. Two more channels of the frames carry
the number of the utterance and of the frame, and one more channel of the predictor's output the
number of labels so far; they tell which step of which utterance a row of the joint is.
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
# Pixels are the same in both schemes, so that "finished" lets the page through.
SHADES = {"working": colour("useful"), "waiting": colour("waiting"), "finished": "#80808026"}


class Watched:
    """Stands for a model and notes the calls of one decode.

    `joint_calls` has a list a call, in it a list an utterance, in it the steps that were computed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.blank: int = model.blank
        self.durations: Sequence[int] = model.durations
        self.joint_calls: list[list[list[Step]]] = []
        self.predictor_calls = 0

    def predict(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The model's predictor, with the number of labels so far in one more channel."""
        self.predictor_calls += 1
        inner, count = state or (None, torch.full((len(labels), 1), -1.0))
        predicted, inner = self.model.predict(labels, inner)
        return torch.cat([predicted, count + 1], 1), (inner, count + 1)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """The model's joint, without the channels that tell the steps."""
        counts = predicted[..., -1:].expand(*encoded.shape[:-1], 1)
        steps = torch.cat([encoded[..., -2:], counts], -1)
        by_utterance = steps.view(len(steps), -1, 3).int().tolist()
        self.joint_calls.append([[tuple(step) for step in row] for row in by_utterance])
        return self.model.join(encoded[..., :-2], predicted[..., :-1])

    @property
    def rows(self) -> int:
        """Rows of the joint: one utterance at one frame each."""
        return sum(len(steps) for call in self.joint_calls for steps in call)

    @property
    def steps(self) -> set[Step]:
        """All steps that were computed."""
        return {step for call in self.joint_calls for steps in call for step in steps}


def watch(model: Any, encoded: Tensor, lengths: Tensor, **options: Any) -> Watched:
    """Decode a batch on the CPU, and note every call of the joint and of the predictor.

    Args:
        model: A transducer.
        encoded: Frames of the encoder, (B, T, D).
        lengths: Frames of each utterance, (B,).
        options: Options of `transducer_greedy`, as strategy="label_looping".
    """
    watched = Watched(model)
    places = [torch.arange(size) for size in encoded.shape[:2]]
    indices = torch.stack(torch.meshgrid(*places, indexing="ij"), -1)
    transducer_greedy(watched, torch.cat([encoded, indices], -1), lengths, **options)
    return watched


def states(watched: Watched, path: set[Step]) -> np.ndarray:
    """What each utterance does in each call of the joint: (B, calls) of WORKING, WAITING, FINISHED.

    A call is work for an utterance if it computes a step of its path that was not yet known.
    Otherwise the utterance waits. It has finished when no step of its path remains.

    Args:
        watched: A decode of the whole batch.
        path: The steps of all paths: those that decoding one by one computes.
    """
    B = len(watched.joint_calls[0])
    found = np.empty((B, len(watched.joint_calls)), dtype=np.int64)
    for b in range(B):
        remaining = {step for step in path if step[0] == b}
        for number, call in enumerate(watched.joint_calls):
            new_steps = remaining.intersection(call[b])
            if not remaining:
                found[b, number] = FINISHED
            elif new_steps:
                found[b, number] = WORKING
            else:
                found[b, number] = WAITING
            remaining -= new_steps
    return found


def waiting_share(of: np.ndarray) -> float:
    """The share of waiting in the calls of all utterances until they finish.

    Args:
        of: States, (B, calls).
    """
    return float((of == WAITING).sum() / (of != FINISHED).sum())


def waits_for(of: np.ndarray) -> np.ndarray:
    """Who waits for whom, in calls: (B, B), a row for who waits, a column for who works.

    Each call in which an utterance waits is charged in equal shares to those that work in it.

    Args:
        of: States, (B, calls).
    """
    works = (of == WORKING).astype(float)
    waits = (of == WAITING).astype(float)
    return waits @ (works / works.sum(0).clip(1)).T


def waiting(states: np.ndarray, ax: Axes, *, calls: int) -> Axes:
    """A row an utterance, a column a call of the joint, coloured by what the utterance does.

    Args:
        states: (B, calls) of 0 working, 1 waiting, 2 finished.
        ax: Axes to draw on; returned.
        calls: Where the axis ends, so that several pictures share one scale.
    """
    shades = ListedColormap(list(SHADES.values()))
    ax.imshow(states, cmap=shades, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    B = len(states)
    ax.set(ylabel="utterance", xlim=(-0.5, calls - 0.5), yticks=range(0, B, -(-B // 4)))
    return ax
