"""GPUs: the rates of their data sheets, and the two numbers that latencies come down to."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Card(NamedTuple):
    """A GPU as it is sold.

    `gib` is what its memory is called, of which driver and context keep about half a GiB. The rate
    is that of its data sheet without tensor cores, of the SXM form where there is one.
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
        batch: Utterances of a call, B.
        seconds: Of each utterance, padding included.
        precision: FP16, TF32, FP32, or another name of an arithmetic.
        latency_ms: Of a call.
        FLOP: Operations of a call.
    """

    batch: int
    seconds: float
    precision: str
    latency_ms: float
    FLOP: float

    @property
    def TFLOP_per_s(self) -> float:
        """Operations over time."""
        return self.FLOP / self.latency_ms / 1e9


@dataclass(frozen=True, kw_only=True)
class TwoNumbers:
    """Latency as max(floor, work / rate).

    Attributes:
        floor_ms: Of a call with little work.
        TFLOP_per_s: Rate of a call with much work.
        deviation: Root mean square of log(latency / predicted): 0.06 is 6 %.
    """

    floor_ms: float
    TFLOP_per_s: float
    deviation: float

    def ms(self, FLOP: float) -> float:
        """Predicted milliseconds of a call with so many operations."""
        return max(self.floor_ms, FLOP / self.TFLOP_per_s / 1e9)


def two_numbers(cells: Iterable[LatencyCell]) -> TwoNumbers:
    """The floor and the rate that come nearest to the latencies, by least squares of logarithms.

    Every split is tried into calls with little work, whose mean is the floor, and calls with much,
    whose mean is the rate.

    Args:
        cells: Of one machine and precision, at least two.
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
