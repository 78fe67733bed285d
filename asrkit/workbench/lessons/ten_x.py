"""Notebook 13: what each rung of a ladder gains, from times taken in turns."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """The median of some ratios, and their quartiles: one estimator for dot and interval."""

    low: float
    middle: float
    high: float


class RungGain(NamedTuple):
    """How many times as fast a rung is: as the baseline, and as the rung below it."""

    rung: str
    total: Spread
    step: Spread


def gains(samples_ms: Mapping[str, Sequence[float]]) -> list[RungGain]:
    """The gain of every rung, from ratios within each repeat.

    Args:
        samples_ms: Rung -> its time in each repeat, the baseline first; each rung stands on those
            before it.
    """
    baseline, *_ = samples_ms.values()
    return [
        RungGain(rung, _spread(baseline, times), _spread(below, times))
        for (_, below), (rung, times) in pairwise(samples_ms.items())
    ]


def _spread(slow_ms: Sequence[float], fast_ms: Sequence[float]) -> Spread:
    repeats = min(len(slow_ms), len(fast_ms))  # of both: an arm may have had enough earlier
    ratios = np.divide(slow_ms[:repeats], fast_ms[:repeats])
    return Spread(*np.percentile(ratios, (25, 50, 75)).tolist())
