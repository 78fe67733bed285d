"""GPUs: the rates of their data sheets, and the two numbers that latencies come down to."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Card(NamedTuple):
    """A GPU as it is sold.

    `gib` is what its memory is called, of which driver and context keep about half a GiB. The rates
    are those of its data sheet, of the SXM form where there is one; None was not looked up.
    """

    name: str
    gib: int
    source: str
    memory_GB_per_s: float | None = None
    float32_TFLOP_per_s: float | None = None  # without tensor cores
    half_TFLOP_per_s: float | None = None  # of tensor cores, float16 or bfloat16, without sparsity


GEFORCE = "https://www.nvidia.com/en-us/geforce/graphics-cards"
DATA_CENTER = "https://www.nvidia.com/en-us/data-center"
# fmt: off
CARDS = (  # memory GB/s, float32 TFLOP/s, half TFLOP/s
    Card("GeForce RTX 3060", 12, f"{GEFORCE}/30-series/rtx-3060-3060ti/"),
    Card("Tesla T4", 16, f"{DATA_CENTER}/tesla-t4/", float32_TFLOP_per_s=8.1),
    Card("Tesla V100 (16 GB)", 16, f"{DATA_CENTER}/v100/", float32_TFLOP_per_s=15.7),
    Card("Tesla V100 (32 GB)", 32, f"{DATA_CENTER}/v100/", float32_TFLOP_per_s=15.7),
    Card("A10", 24, f"{DATA_CENTER}/products/a10-gpu/"),
    Card("L4", 24, f"{DATA_CENTER}/l4/", 300, 30.3),
    Card("GeForce RTX 4090", 24, f"{GEFORCE}/40-series/rtx-4090/"),
    Card("GeForce RTX 5090", 32, f"{GEFORCE}/50-series/rtx-5090/"),
    Card("A100 (40 GB)", 40, f"{DATA_CENTER}/a100/"),
    Card("A100 (80 GB)", 80, f"{DATA_CENTER}/a100/", 2039, 19.5, 312),
    Card("H100", 80, f"{DATA_CENTER}/h100/", 3350, 67, 989.5),
    Card("H200", 141, f"{DATA_CENTER}/h200/", 4800, 67, 989.5),
)
# fmt: on


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
