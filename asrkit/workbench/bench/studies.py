"""Claims that are measured together, and the records of what was measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from asrkit.workbench.measure import Timing, ratio
from asrkit.workbench.records import Measurement


class StudyRecords:
    """Makes the measurements of one study, which share these params.

    Args:
        device: that is measured.
        quick: sizes are toy sizes, which settle no claim.
        params: more params of every record.
    """

    def __init__(self, device: str, quick: bool, **params: Any) -> None:
        self.params: dict[str, Any] = {"weights": "random", "device": device, "suite": "claims"}
        if quick:
            self.params["quick"] = True
        self.params |= params

    def value(
        self,
        what: str,
        samples: Sequence[float],
        timing: Timing,
        impl: str,
        *,
        metric: str = "latency",
        unit: str = "ms",
        **params: Any,
    ) -> Measurement:
        """A measurement of one arm.

        Args:
            what: the claim's or benchmark's id.
            samples: one value a repeat, in `unit`.
            timing: that they were taken in.
            impl: the arm's name.
            metric: what the samples are.
            unit: of the samples.
            params: of this record alone.
        """
        return Measurement(
            what,
            metric,
            unit,
            median(samples),
            tuple(samples),
            impl=impl,
            timer=timing.timer,
            warmup=timing.warmup,
            params={"threads": torch.get_num_threads()} | self.params | params,
        )

    def ratio(
        self,
        what: str,
        times: Mapping[str, Timing],
        slow: str,
        fast: str,
        *,
        arms: Sequence[str] = (),
        **params: Any,
    ) -> Measurement:
        """How many times as fast one arm is as another.

        Args:
            what: the claim's id.
            times: of all arms, taken in turns.
            slow: the arm that is divided.
            fast: the arm that it is divided by.
            arms: what the claim calls them, where that differs.
            params: of this record alone.
        """
        names = [*arms] or [slow, fast]
        samples = ratio(times, slow, fast)
        return self.value(
            what, samples, times[fast], names[1], metric="ratio", unit="1", arms=names, **params
        )


@dataclass(frozen=True, kw_only=True)
class StudySizes:
    """Sizes of the studies."""

    utterances: int  # a batch of a recogniser or an encoder
    seconds: int  # of its longest utterance
    layers: int  # of the CTC model
    loops: tuple[int, int]  # utterances and frames that are only decoded
    planted: Mapping[str, Any]  # sizes of a planted transducer that differ from the default ones
    frontend: tuple[int, int]  # utterances, and seconds of the longest at most
    product: tuple[int, int, int]  # rows, width and inner width
    product_repeats: int


def repeats(device: str, quick: bool) -> dict[str, Any]:
    """Keywords of `measure` for a study."""
    counts = {"repeats": 20, "warmup": 3}
    if quick:
        counts = {"repeats": 3, "warmup": 1}
    return counts | {"enough_s": 1.0, "most_s": 10.0, "device": device}


def idle(call: Callable[[], object], timing: Timing) -> tuple[float, ...]:
    """Share of each repeat in which a GPU ran nothing.

    Args:
        call: what was timed; it runs once more under torch.profiler, for its kernels' time.
        timing: of `call`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    kernels = [event for event in profile.events() or () if event.device_type == gpu]
    busy_ms = sum(event.time_range.elapsed_us() for event in kernels) / 1e3
    return tuple(max(0.0, 1 - busy_ms / ms) for ms in timing.samples_ms)
