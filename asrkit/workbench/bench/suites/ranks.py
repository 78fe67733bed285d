"""Cases of training by several processes of this machine."""

import functools
from collections.abc import Iterator
from typing import Any

from asrkit.runtime import usable_cores
from asrkit.workbench.bench.cases import Case, median_of
from asrkit.workbench.bench.weak_scaling import weak_scaling
from asrkit.workbench.records import Measurement

WHAT = "training-ranks"
ROUNDS = 5


def cases(device: str, quick: bool) -> Iterator[Case]:
    """One process against two that train a small Jasper, on a CPU of two cores or more.

    Args:
        device: "cpu" or "cuda".
        quick: One round of short steps.
    """
    if device == "cpu" and usable_cores() >= 2:
        yield Case(
            what=WHAT,
            measure=functools.partial(measure_ranks, quick),
            params={"dtype": "float32"},
        )


def measure_ranks(quick: bool) -> Iterator[Measurement]:
    """Utterances a second of two processes over those of one, and the time of agreeing on a step.

    Each process has one thread and a batch of its own; gloo sums the gradients over loopback.

    Args:
        quick: One round of short steps.
    """
    sizes: dict[str, Any] = {"batch": 8, "frames": 400, "steps": 5}
    if quick:
        sizes = {"batch": 2, "frames": 80, "steps": 1}
    ratios = []
    agree_ms = []
    for _ in range(1 if quick else ROUNDS):
        found = weak_scaling((1, 2), **sizes)
        ratios.append(found[2]["utterances_per_s"] / found[1]["utterances_per_s"])
        agree_ms.append(found[2]["agree_ms"])
    params: dict[str, Any] = {"dtype": "float32", "preset": "mini_jasper", "processes": 2, **sizes}
    if quick:
        params["quick"] = True
    arms = ["one_process", "two_processes"]
    yield median_of(WHAT, "ratio", "1", ratios, params=params | {"arms": arms})
    yield median_of(WHAT, "agreement", "ms", agree_ms, params=params)
