"""What a Jasper costs, counted, and the two numbers that published latencies come down to.

Counts are of the sizes of a `JasperConfig`; no tensor is made. The tables are those of
data/published, which its README describes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from asrkit.shapes import expect, whole
from asrkit.workbench.cost.csv_tables import Row, read_table

if TYPE_CHECKING:
    from asrkit.models.jasper import JasperConfig

TABLE = "published/jasper_inference.csv"
FRAMES_PER_S = 100  # of features
CHARACTERS = 28  # of the published model, without blank
GRID_STEPS = 81  # of each of the two numbers, in each round of the fit
ROUNDS = 6  # each in a grid around the best point of the one before


def jasper_convolutions(config: "JasperConfig") -> list[int]:
    """Weights of the convolutions of each stage, its branches included.

    Args:
        config: Sizes of the encoder.
    """
    counts = []
    inputs = config.bins
    for stage, branches in zip(config.stages, config.branch_channels(), strict=True):
        first = inputs * stage.channels * stage.kernel
        others = (stage.repeat - 1) * stage.channels**2 * stage.kernel
        counts.append(first + others + sum(branches) * stage.channels)
        inputs = stage.channels
    return counts


def jasper_parameters(config: "JasperConfig", *, vocab_size: int | None = CHARACTERS) -> int:
    """Weights of a Jasper: its convolutions, batch norms, and the CTC head.

    Args:
        config: Sizes of the encoder.
        vocab_size: Labels of the head, without blank; None leaves the head out.

    >>> from asrkit.models.jasper import JasperConfig
    >>> jasper_parameters(JasperConfig())
    332632349
    """
    norms = 0
    for stage, branches in zip(config.stages, config.branch_channels(), strict=True):
        norms += 2 * stage.channels * (stage.repeat + len(branches))
    head = 0
    if vocab_size is not None:
        expect(whole(vocab_size, 1), "vocab_size", "at least 1, or None", vocab_size)
        head = (config.stages[-1].channels + 1) * (vocab_size + 1)
    return sum(jasper_convolutions(config)) + norms + head


def jasper_flops(
    config: "JasperConfig", *, frames: int, B: int = 1, vocab_size: int | None = CHARACTERS
) -> int:
    """Operations of the convolutions and the head: two for each weight and frame of output.

    Args:
        config: Sizes of the encoder.
        frames: Feature frames of an utterance, padding included; 100 are a second.
        B: Utterances.
        vocab_size: Labels of the head, without blank; None leaves the head out.

    >>> from asrkit.models.jasper import JasperConfig
    >>> round(jasper_flops(JasperConfig(), frames=100) / 1e9, 1)
    33.2
    """
    expect(whole(frames, 1), "frames", "at least 1", frames)
    expect(whole(B, 1), "B", "at least 1", B)
    T = frames
    FLOP = 0
    for stage, weights in zip(config.stages, jasper_convolutions(config), strict=True):
        T = -(-T // stage.stride)
        FLOP += 2 * weights * T
    if vocab_size is not None:
        FLOP += 2 * config.stages[-1].channels * (vocab_size + 1) * T
    return B * FLOP


@dataclass(frozen=True, kw_only=True)
class LatencyCell:
    """A cell of a table of latencies.

    Attributes:
        batch: Utterances of a call, B.
        seconds: Of each utterance, padding included.
        precision: FP16, TF32, FP32, or another name of an arithmetic.
        latency_ms: Of a call.
        FLOP: Operations of a call.
        system: Machine of a published cell; empty for others.
        gpu: Its GPU; empty for others.
    """

    batch: int
    seconds: float
    precision: str
    latency_ms: float
    FLOP: float
    system: str = ""
    gpu: str = ""

    @property
    def TFLOP_per_s(self) -> float:
        """Operations over time."""
        return self.FLOP / self.latency_ms / 1e9


def published_latencies(
    system: str | None = None, precision: str | None = None
) -> list[LatencyCell]:
    """Cells of Jasper's published inference tables; their latency is the printed mean.

    Args:
        system: Machine, such as "DGX A100"; None for all.
        precision: FP16, TF32 or FP32; None for all.

    Raises:
        ValueError: The tables have no such cell.
    """
    from asrkit.models.jasper import JasperConfig

    config = JasperConfig()

    def parse(row: Row) -> LatencyCell:
        batch = int(row["batch"])
        seconds = float(row["duration_s"])
        frames = round(FRAMES_PER_S * seconds)
        return LatencyCell(
            batch=batch,
            seconds=seconds,
            precision=row["precision"],
            latency_ms=float(row["avg_ms"]),
            FLOP=jasper_flops(config, frames=frames, B=batch),
            system=row["system"],
            gpu=row["gpu"],
        )

    cells = read_table(TABLE, parse)
    known = sorted({f"{cell.system} in {cell.precision}" for cell in cells})
    wanted = [
        cell
        for cell in cells
        if system in (None, cell.system) and precision in (None, cell.precision)
    ]
    expect(bool(wanted), "system, precision", f"one of {known}", (system, precision))
    return wanted


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

    Args:
        cells: Of one machine and precision.

    Raises:
        ValueError: Fewer than three cells, or all of one amount of work.
    """
    cells = list(cells)
    expect(len(cells) >= 3, "cells", "at least three", len(cells))
    work = np.array([cell.FLOP for cell in cells], dtype=float)
    varied = work.min() < work.max()
    expect(varied, "cells", "two amounts of work at least", f"{work[0]:g} FLOP in all")
    times = np.log([cell.latency_ms for cell in cells])
    work_log = np.log(work / 1e9)  # of milliseconds at 1 TFLOP/s

    def spread(floor: np.ndarray, rate: np.ndarray) -> np.ndarray:
        """Mean squares (floors, rates); both are logarithms."""
        by_rate = work_log - rate[None, :, None]
        predicted = np.maximum(floor[:, None, None], by_rate)
        return ((times - predicted) ** 2).mean(-1)

    floor_range = (times.min(), times.max())
    rates = work_log - times
    rate_range = (rates.min(), rates.max())
    for _ in range(ROUNDS):
        floors = np.linspace(*floor_range, GRID_STEPS)
        rate_steps = np.linspace(*rate_range, GRID_STEPS)
        errors = spread(floors, rate_steps)
        row, column = np.unravel_index(errors.argmin(), errors.shape)
        floor_range = _around(floors, int(row))
        rate_range = _around(rate_steps, int(column))
    return TwoNumbers(
        floor_ms=math.exp(floors[row]),
        TFLOP_per_s=math.exp(rate_steps[column]),
        deviation=math.sqrt(errors.min()),
    )


def _around(steps: Sequence[float] | np.ndarray, best: int) -> tuple[float, float]:
    """The range of three steps on either side of the best one."""
    return float(steps[max(best - 3, 0)]), float(steps[min(best + 3, len(steps) - 1)])
