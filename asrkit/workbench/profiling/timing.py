"""Times of rival arms, interleaved in one run: what drifts on the machine meets all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch

from asrkit.shapes import expect


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Milliseconds of one call: on the clock, and of work by all threads of the process (None on
    CUDA).

    Threads that spin while they wait count as work: OMP_WAIT_POLICY=passive, as the command line
    sets it, keeps them asleep.
    """

    wall_ms: float
    cpu_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of each repeat of one arm, in the order they were taken; warm-up left out."""

    samples_ms: tuple[float, ...]
    warmup: int
    timer: str
    cpu_ms: tuple[float, ...] | None = None  # of all threads together; None on CUDA

    def percentile_ms(self, percent: float) -> float:
        """Milliseconds that `percent` of the repeats stayed within, interpolated."""
        return float(np.percentile(self.samples_ms, percent))

    median_ms = property(lambda self: self.percentile_ms(50))


def measure(
    arms: Mapping[str, Callable[..., object]],
    *,
    setups: Mapping[str, Callable[[], Any]] | None = None,
    repeats: int = 20,
    warmup: int = 3,
    enough_s: float = inf,
    most_s: float = inf,
    device: str = "cpu",
    until: float = inf,
    watch: Callable[[Callable[[], dict[str, Timing]]], object] = bool,
) -> dict[str, Timing]:
    """A Timing of every arm. Each repeat calls all arms once, and each time another one goes first.

    CPU: time.perf_counter_ns around the call, and time.process_time_ns. CUDA: events around it,
    waited for, on a device idle at the start. An arm with a setup is called with what that makes,
    anew for each call and outside the time. An arm that returns a Sample, having timed itself in
    another process, is believed. Repeats of an arm end early once they have taken `enough_s` and
    are at least three, or have taken `most_s`; so arm by arm their number may differ.

    until: of time.monotonic(), from when on no round of repeats begins but the first. watch: is
    called after each call that counts, with what gives the Timings so far, of the arms that have
    any: who is killed before the end can have kept those.
    """
    expect(len(arms) > 0, "arms", "at least one callable", dict(arms))
    expect(
        repeats >= 1 and warmup >= 0,
        "repeats, warmup",
        "repeats >= 1 and warmup >= 0",
        (repeats, warmup),
    )
    kind = torch.device(device).type
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(device))
    taken: dict[str, list[Sample]] = {name: [] for name in arms}
    names = list(arms)
    timer = "torch.cuda.Event" if kind == "cuda" else "time.perf_counter_ns"

    def so_far() -> dict[str, Timing]:
        return {name: _timing(samples, warmup, timer) for name, samples in taken.items() if samples}

    for repeat in range(-warmup, repeats):
        if repeat > 0 and time.monotonic() >= until:
            break
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            spent_s = sum(sample.wall_ms for sample in taken[name]) / 1e3
            if spent_s >= most_s or (spent_s >= enough_s and len(taken[name]) >= 3):
                continue
            given = [setups[name]()] if setups and name in setups else []
            sample = _cuda(arms[name], given, device) if kind == "cuda" else _cpu(arms[name], given)
            if repeat >= 0:
                taken[name].append(sample)
                watch(so_far)
    return so_far()


def _timing(samples: list[Sample], warmup: int, timer: str) -> Timing:
    cpu_ms = tuple(sample.cpu_ms for sample in samples if sample.cpu_ms is not None)
    return Timing(
        samples_ms=tuple(sample.wall_ms for sample in samples),
        cpu_ms=cpu_ms or None,
        warmup=warmup,
        timer=timer,
    )


def _cpu(arm: Callable[..., object], given: list[Any]) -> Sample:
    start, cpu = time.perf_counter_ns(), time.process_time_ns()
    result = arm(*given)
    told = result if isinstance(result, Sample) else None
    del result  # giving back what was made is part of the time
    cpu, end = time.process_time_ns() - cpu, time.perf_counter_ns()
    return told or Sample(wall_ms=(end - start) / 1e6, cpu_ms=cpu / 1e6)


def _cuda(arm: Callable[..., object], given: list[Any], device: str) -> Sample:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = arm(*given)
        end.record()
        told = result if isinstance(result, Sample) else None
        del result
        end.synchronize()
        return told or Sample(wall_ms=start.elapsed_time(end), cpu_ms=None)


def ratio(timings: Mapping[str, Timing], slow: str, fast: str) -> tuple[float, ...]:
    """How many times as long `slow` took as `fast`, one ratio for each repeat that both had."""
    return tuple(
        a / b for a, b in zip(timings[slow].samples_ms, timings[fast].samples_ms, strict=False)
    )
