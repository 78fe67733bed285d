"""Wall times of rival arms, interleaved in one run: what drifts on the machine meets all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from asrkit.shapes import expect


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of each repeat of one arm, in the order they were taken; warm-up left out."""

    samples_ms: tuple[float, ...]
    warmup: int
    timer: str

    def percentile_ms(self, percent: float) -> float:
        """Milliseconds that `percent` of the repeats stayed within, interpolated."""
        return float(np.percentile(self.samples_ms, percent))

    median_ms = property(lambda self: self.percentile_ms(50))


def measure(
    arms: Mapping[str, Callable[[], object]], *, repeats: int = 20, warmup: int = 3, device: str = "cpu"
) -> dict[str, Timing]:
    """A Timing of every arm. Each repeat calls all arms once, and each time another one goes first.

    CPU: time.perf_counter_ns around the call. CUDA: events around it, waited for, on a device idle at the start.
    """
    expect(len(arms) > 0, "arms", "at least one callable", dict(arms))
    expect(repeats >= 1 and warmup >= 0, "repeats, warmup", "repeats >= 1 and warmup >= 0", (repeats, warmup))
    kind = torch.device(device).type
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(device))
    samples: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for repeat in range(-warmup, repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            taken = _cuda_ms(arms[name], device) if kind == "cuda" else _cpu_ms(arms[name])
            if repeat >= 0:
                samples[name].append(taken)
    timer = "torch.cuda.Event" if kind == "cuda" else "time.perf_counter_ns"
    return {name: Timing(samples_ms=tuple(taken), warmup=warmup, timer=timer) for name, taken in samples.items()}


def _cpu_ms(arm: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    arm()
    return (time.perf_counter_ns() - start) / 1e6


def _cuda_ms(arm: Callable[[], object], device: str) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        arm()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def ratio(timings: Mapping[str, Timing], slow: str, fast: str) -> tuple[float, ...]:
    """How many times as long `slow` took as `fast`, one ratio for each repeat."""
    return tuple(a / b for a, b in zip(timings[slow].samples_ms, timings[fast].samples_ms, strict=True))
