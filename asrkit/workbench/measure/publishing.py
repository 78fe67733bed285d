"""Measurements from timings (of one arm, or the ratio of two) and from error rates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from asrkit.rtfx import rtfx
from asrkit.text import ErrorRate
from asrkit.workbench.measure import Timing, ratio
from asrkit.workbench.records import Measurement, publish

Params = Mapping[str, Any]


def latency(what: str, timing: Timing, **fields: Any) -> Measurement:
    """The time of an arm in ms, with `fields` of the Measurement."""
    return of_samples(what, "latency", "ms", timing.samples_ms, timing, **fields)


def of_samples(
    what: str, metric: str, unit: str, samples: Sequence[float], timing: Timing, **fields: Any
) -> Measurement:
    """A quantity with one sample per repeat of a timing, with `fields` of the Measurement."""
    return Measurement(
        what,
        metric,
        unit,
        median(samples),
        tuple(samples),
        timing.warmup,
        timer=timing.timer,
        **fields,
    )


def arm_measurements(
    what: str,
    timing: Timing,
    *,
    audio_s: float | None,
    peak_B: int | None,
    memory_timer: str,
    **fields: Any,
) -> Iterator[Measurement]:
    """Latency, RTFx, CPU time and peak memory of an arm, as far as they are known.

    Args:
        what: name of the benchmark.
        timing: times of the arm.
        audio_s: seconds of speech per call; None if it is not speech.
        peak_B: peak memory; None if not measured.
        memory_timer: how it was measured.
        fields: fields of all Measurements.
    """
    yield latency(what, timing, **fields)
    if audio_s:
        rates = [rtfx(audio_s, ms / 1e3) for ms in timing.samples_ms]
        yield of_samples(what, "rtfx", "s/s", rates, timing, **fields)
    if timing.cpu_ms:
        work = of_samples(what, "cpu_time", "ms", timing.cpu_ms, timing, **fields)
        yield replace(work, timer="time.process_time_ns")
    if peak_B is not None:
        yield Measurement(what, "peak_memory", "B", peak_B, timer=memory_timer, **fields)


def time_ratio(
    what: str, times: Mapping[str, Timing], slow: str, fast: str, **fields: Any
) -> Measurement:
    """The time of `slow` over that of `fast` in each repeat, with `fields` of the Measurement."""
    return of_samples(what, "ratio", "1", ratio(times, slow, fast), times[fast], **fields)


def error_rate(
    what: str, metric: str, errors: ErrorRate, *, impl: str, params: Params
) -> Measurement:
    """An error rate with its counts and interval."""
    counts = {name: value for name, value in vars(errors).items() if name != "rate"}
    return Measurement(
        what, metric, "fraction", errors.rate, impl=impl, params={**params, **counts}
    )


def publish_times(
    what: str,
    times: Mapping[str, Timing],
    params: Params,
    *,
    impls: Mapping[str, str] | None = None,
) -> None:
    """Publish the latency of each arm from a notebook.

    Args:
        what: name of the measurement.
        times: timings by arm.
        params: params of every record: shape, dtype, device and so on.
        impls: arm to implementation; None if the names are the same.
    """
    for name, timing in times.items():
        impl = name if impls is None else impls[name]
        publish(latency(what, timing, impl=impl, params={**params}))


def publish_ratio(
    what: str,
    times: Mapping[str, Timing],
    slow: str,
    fast: str,
    params: Params,
    *,
    impl: str = "",
    arms: Sequence[str] = (),
) -> dict[str, Any]:
    """Publish the time of `slow` over that of `fast`; returns the record.

    Args:
        what: name of the measurement, or id of a claim.
        times: interleaved timings of both arms.
        slow: arm in the numerator.
        fast: arm in the denominator.
        params: params of the record; "arms" is added.
        impl: implementation that the record is about; by default `fast`.
        arms: the claim's names of the two arms, if they differ.
    """
    named = {**params, "arms": [*arms] or [slow, fast]}
    record = time_ratio(what, times, slow, fast, impl=impl or fast, params=named).record()
    publish(record)
    return record
