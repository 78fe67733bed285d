"""Notebook 13: the gain of each rung of a ladder, from interleaved times."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """The median of ratios with their quartiles."""

    low: float
    middle: float
    high: float


class RungGain(NamedTuple):
    """The speed-up of a rung over the baseline, and over the rung below it."""

    rung: str
    total: Spread
    step: Spread


def gains(samples_ms: Mapping[str, Sequence[float]]) -> list[RungGain]:
    """The gain of every rung, from ratios within each repeat.

    Args:
        samples_ms: Rung -> its time in each repeat. The baseline comes first, and each rung
            includes those before it.
    """
    baseline, *_ = samples_ms.values()
    return [
        RungGain(rung, _spread(baseline, times), _spread(below, times))
        for (_, below), (rung, times) in pairwise(samples_ms.items())
    ]


def _spread(slow_ms: Sequence[float], fast_ms: Sequence[float]) -> Spread:
    repeats = min(len(slow_ms), len(fast_ms))  # an arm may stop early, when it has enough samples
    ratios = np.divide(slow_ms[:repeats], fast_ms[:repeats])
    return Spread(*np.percentile(ratios, (25, 50, 75)).tolist())
