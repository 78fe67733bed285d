"""Times of arms, interleaved in one run, so that drift of the machine meets all alike."""

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
        wall_ms: By the clock.
        cpu_ms: Of work by all threads of the process; None on CUDA. Threads that spin while they
            wait count as work: with OMP_WAIT_POLICY=passive they sleep.
    """

    wall_ms: float
    cpu_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of each repeat of one arm, in the order in which they were taken.

    Attributes:
        samples_ms: By the clock, without warm-up.
        warmup: Calls before the first sample.
        timer: What measured the time.
        cpu_ms: Work of all threads together; None on CUDA.
    """

    samples_ms: tuple[float, ...]
    warmup: int
    timer: str
    cpu_ms: tuple[float, ...] | None = None

    def percentile_ms(self, percent: float) -> float:
        """Milliseconds that `percent` of the samples stay within, interpolated."""
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
    """Time arms. Each repeat calls all of them once, and each time another one goes first.

    CPU: time.perf_counter_ns around the call, and time.process_time_ns. CUDA: events around it,
    on a device idle at the start, which are waited for.

    Args:
        arms: Functions by name. One that returns a `Sample` has timed itself, as a peer in another
            process does, and is believed.
        setups: Functions by the name of an arm: it is called with their result, made anew for each
            call and outside the time.
        repeats: Calls of each arm that count.
        warmup: Calls of each arm before those.
        enough_s: Seconds after which an arm with three samples at least is called no more.
        most_s: Seconds after which any arm is called no more. With either, the number of samples
            may differ from arm to arm.
        device: "cpu" or "cuda".

    Returns:
        A timing for every arm that has a sample.

    Raises:
        ValueError: No arms, or a number that makes no sense.
    """
    expect(len(arms) > 0, "arms", "at least one callable", dict(arms))
    counts = (repeats, warmup)
    makes_sense = repeats >= 1 and warmup >= 0
    expect(makes_sense, "repeats, warmup", "repeats >= 1 and warmup >= 0", counts)
    expect_choice("device", device, ("cpu", "cuda"))
    on_cuda = device == "cuda"
    clock = _time_on_cuda if on_cuda else _time_on_cpu
    taken: dict[str, list[Sample]] = {name: [] for name in arms}
    names = list(arms)
    for repeat in range(-warmup, repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            samples = taken[name]
            limit_s = min(enough_s, most_s) if len(samples) >= 3 else most_s
            if sum(sample.wall_ms for sample in samples) / 1e3 < limit_s:
                given = [setups[name]()] if setups and name in setups else []
                sample = clock(arms[name], given)
                if repeat >= 0:
                    samples.append(sample)
    timings = {}
    for name, samples in taken.items():
        if samples:
            timings[name] = Timing(
                samples_ms=tuple(sample.wall_ms for sample in samples),
                cpu_ms=tuple(one.cpu_ms for one in samples if one.cpu_ms is not None) or None,
                warmup=warmup,
                timer="torch.cuda.Event" if on_cuda else "time.perf_counter_ns",
            )
    return timings


def _time_on_cpu(arm: Callable[..., object], given: list[Any]) -> Sample:
    start = time.perf_counter_ns()
    cpu_start = time.process_time_ns()
    own_sample = _own_sample(arm(*given))  # freeing what else was made is part of the time
    cpu_ns = time.process_time_ns() - cpu_start
    wall_ns = time.perf_counter_ns() - start
    return own_sample or Sample(wall_ms=wall_ns / 1e6, cpu_ms=cpu_ns / 1e6)


def _time_on_cuda(arm: Callable[..., object], given: list[Any]) -> Sample:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    own_sample = _own_sample(arm(*given))
    end.record()
    end.synchronize()
    return own_sample or Sample(wall_ms=start.elapsed_time(end), cpu_ms=None)


def _own_sample(result: object) -> Sample | None:
    """The time that an arm took itself, if it returns that."""
    if isinstance(result, Sample):
        return result
    return None


def ratio(timings: Mapping[str, Timing], slow: str, fast: str) -> tuple[float, ...]:
    """How many times as long `slow` took as `fast`, one ratio for each repeat that both have.

    Args:
        timings: What `measure` returned.
        slow: Name of the arm in the numerator.
        fast: Name of the arm in the denominator.
    """
    pairs = zip(timings[slow].samples_ms, timings[fast].samples_ms, strict=False)
    return tuple(slow_ms / fast_ms for slow_ms, fast_ms in pairs)
