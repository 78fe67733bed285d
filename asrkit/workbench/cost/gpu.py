"""GPUs: data sheets, and a model of latency with two numbers, a floor and a rate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Card(NamedTuple):
    """A GPU as it is sold.

    Attributes:
        name: Name of the product.
        gib: Nominal memory; driver and context take about half a GiB of it.
        float32_TFLOP_per_s: Rate without tensor cores, for the SXM form if there is one.
        source: Address of the data sheet.
    """

    name: str
    gib: int
    float32_TFLOP_per_s: float
    source: str


DATA_CENTER = "https://www.nvidia.com/en-us/data-center"
CARDS = (
    Card("Tesla T4", 16, 8.1, f"{DATA_CENTER}/tesla-t4/"),
    Card("Tesla V100 (16 GB)", 16, 15.7, f"{DATA_CENTER}/v100/"),
    Card("A100 (80 GB)", 80, 19.5, f"{DATA_CENTER}/a100/"),
)


@dataclass(frozen=True, kw_only=True)
class LatencyCell:
    """A cell of a table of latencies.

    Attributes:
        batch: Number of utterances in a call, B.
        seconds: Length of each utterance, padding included.
        precision: FP16, TF32, FP32 or another precision.
        latency_ms: Latency of a call.
        FLOP: Operations of a call.
    """

    batch: int
    seconds: float
    precision: str
    latency_ms: float
    FLOP: float

    @property
    def TFLOP_per_s(self) -> float:
        """Operations divided by time."""
        return self.FLOP / self.latency_ms / 1e9


@dataclass(frozen=True, kw_only=True)
class TwoNumbers:
    """Latency as max(floor, work / rate).

    Attributes:
        floor_ms: Latency of a call with little work.
        TFLOP_per_s: Rate of a call with much work.
        deviation: Root mean square of log(latency / predicted); 0.06 is 6 %.
    """

    floor_ms: float
    TFLOP_per_s: float
    deviation: float

    def ms(self, FLOP: float) -> float:
        """Predicted milliseconds of a call with this number of operations."""
        return max(self.floor_ms, FLOP / self.TFLOP_per_s / 1e9)


def two_numbers(cells: Iterable[LatencyCell]) -> TwoNumbers:
    """The floor and the rate that fit the latencies best, by least squares of logarithms.

    All splits into calls with little work and calls with much work are tried. The former give the
    floor as their mean, the latter the rate.

    Args:
        cells: At least two cells of one machine and precision.
    """
    by_work = sorted(cells, key=lambda cell: cell.FLOP)
    ms = np.log([cell.latency_ms for cell in by_work])
    ms_at_1_TFLOP_per_s = np.log([cell.FLOP / 1e9 for cell in by_work])
    fits = []
    for split in range(1, len(by_work)):
        floor = ms[:split].mean()
        rate = (ms_at_1_TFLOP_per_s - ms)[split:].mean()
        gaps = ms - np.maximum(floor, ms_at_1_TFLOP_per_s - rate)
        fits.append((float(np.sqrt((gaps**2).mean())), floor, rate))
    deviation, floor, rate = min(fits)
    return TwoNumbers(floor_ms=math.exp(floor), TFLOP_per_s=math.exp(rate), deviation=deviation)
