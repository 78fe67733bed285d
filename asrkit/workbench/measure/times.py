"""Times of arms, interleaved in one run, so that drift of the machine affects all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch

from asrkit.shapes import expect, expect_choice


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Milliseconds of one call.

    Attributes:
        wall_ms: Time by the clock.
        cpu_ms: CPU time of all threads of the process; None on CUDA. A thread that spins while it
            waits counts as working; with OMP_WAIT_POLICY=passive it sleeps.
    """

    wall_ms: float
    cpu_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of each repeat of one arm, in order.

    Attributes:
        samples_ms: Time by the clock, without warm-up.
        warmup: Number of calls before the first sample.
        timer: The function that measured the time.
        cpu_ms: CPU time of all threads; None on CUDA.
    """

    samples_ms: tuple[float, ...]
    warmup: int
    timer: str
    cpu_ms: tuple[float, ...] | None = None

    def percentile_ms(self, percent: float) -> float:
        """The percentile of the samples, interpolated; `percent` is from 0 to 100."""
        return float(np.percentile(self.samples_ms, percent))

    @property
    def median_ms(self) -> float:
        """Median of the samples."""
        return self.percentile_ms(50)


def measure(
    arms: Mapping[str, Callable[..., object]],
    *,
    setups: Mapping[str, Callable[[], Any]] | None = None,
    repeats: int = 20,
    warmup: int = 3,
    enough_s: float = inf,
    most_s: float = inf,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Time arms. Each repeat calls every arm once, and each arm goes first in turn.

    On a CPU, a call is timed by time.perf_counter_ns and time.process_time_ns. On CUDA, it is timed
    by events; the device is idle at the start, and the last event is waited for.

    Args:
        arms: Functions by name. One that returns a `Sample` does its own timing, such as a peer in
            another process; its sample is used as it is.
        setups: Functions by the name of an arm. One is called before each call of the arm, outside
            the timed region, and the arm gets its result as argument.
        repeats: Timed calls of each arm.
        warmup: Calls of each arm before the timed ones.
        enough_s: Time in seconds after which an arm is called no more, once it has three samples.
        most_s: Time in seconds after which an arm is called no more. With either limit, arms may
            have different numbers of samples. Each limit also ends the warm-up of an arm.
        device: "cpu" or "cuda".

    Returns:
        A timing for every arm that has a sample.

    Raises:
        ValueError: There are no arms, or a number is out of range.
    """
    expect(len(arms) > 0, "arms", "at least one callable", dict(arms))
    in_range = repeats >= 1 and warmup >= 0
    wanted = "repeats >= 1 and warmup >= 0"
    expect(in_range, "repeats, warmup", wanted, (repeats, warmup))
    expect_choice("device", device, ("cpu", "cuda"))
    on_cuda = device == "cuda"
    clock = _time_on_cuda if on_cuda else _time_on_cpu
    warmups: dict[str, list[Sample]] = {name: [] for name in arms}
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    names = list(arms)
    for repeat in range(-warmup, repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            earlier, least = (samples[name], 3) if repeat >= 0 else (warmups[name], 1)
            limit_s = most_s if len(earlier) < least else min(enough_s, most_s)
            if sum(sample.wall_ms for sample in earlier) / 1e3 < limit_s:
                arguments = [setups[name]()] if setups and name in setups else []
                earlier.append(clock(arms[name], arguments))
    return {
        name: Timing(
            samples_ms=tuple(sample.wall_ms for sample in of_arm),
            cpu_ms=tuple(one.cpu_ms for one in of_arm if one.cpu_ms is not None) or None,
            warmup=len(warmups[name]),
            timer="torch.cuda.Event" if on_cuda else "time.perf_counter_ns",
        )
        for name, of_arm in samples.items()
        if of_arm
    }


def _time_on_cpu(arm: Callable[..., object], arguments: list[Any]) -> Sample:
    start = time.perf_counter_ns()
    cpu_start = time.process_time_ns()
    own_sample = _own_sample(arm(*arguments))  # the time includes freeing the rest of the result
    cpu_ns = time.process_time_ns() - cpu_start
    wall_ns = time.perf_counter_ns() - start
    return own_sample or Sample(wall_ms=wall_ns / 1e6, cpu_ms=cpu_ns / 1e6)


def _time_on_cuda(arm: Callable[..., object], arguments: list[Any]) -> Sample:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    own_sample = _own_sample(arm(*arguments))
    end.record()
    end.synchronize()
    return own_sample or Sample(wall_ms=start.elapsed_time(end), cpu_ms=None)


def _own_sample(result: object) -> Sample | None:
    """The result of an arm if it is a `Sample`."""
    if isinstance(result, Sample):
        return result
    return None


def ratio(timings: Mapping[str, Timing], slow: str, fast: str) -> tuple[float, ...]:
    """The time of `slow` over that of `fast`, for each repeat that both have.

    Args:
        timings: The result of `measure`.
        slow: Name of the arm in the numerator.
        fast: Name of the arm in the denominator.
    """
    pairs = zip(timings[slow].samples_ms, timings[fast].samples_ms, strict=False)
    return tuple(slow_ms / fast_ms for slow_ms, fast_ms in pairs)
