"""Records of timings, published from a notebook: of each arm, and of how two arms compare."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from asrkit.workbench import records
from asrkit.workbench.measure import Timing, ratio

Params = Mapping[str, Any]


def publish_times(
    what: str,
    times: Mapping[str, Timing],
    params: Params,
    *,
    impls: Mapping[str, str] | None = None,
) -> None:
    """Publish the latency of each arm, in ms.

    Args:
        what: Name of the measurement.
        times: Timings by the name of the arm.
        params: Parameters of every record: shape, dtype, device and so on.
        impls: Arm -> the implementation that ran, where the two names differ.
    """
    for name, timing in times.items():
        impl = name
        if impls is not None:
            impl = impls[name]
        measurement = records.Measurement(
            what,
            "latency",
            "ms",
            timing.median_ms,
            timing.samples_ms,
            impl=impl,
            timer=timing.timer,
            warmup=timing.warmup,
            params=dict(params),
        )
        records.publish(measurement)


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
    """Publish how many times as long `slow` took as `fast`; returns the record.

    Args:
        what: Name of the measurement, or id of the claim that it answers.
        times: Timings of both arms, taken in turns.
        slow: The arm that is divided.
        fast: The arm that it is divided by.
        params: Parameters of the record; "arms" is added.
        impl: The implementation that the record is about; by default `fast`.
        arms: What the claim calls the two arms, where that differs.
    """
    samples = ratio(times, slow, fast)
    names = [*arms] or [slow, fast]
    measurement = records.Measurement(
        what,
        "ratio",
        "1",
        median(samples),
        samples,
        impl=impl or fast,
        timer=times[fast].timer,
        warmup=times[fast].warmup,
        params={**params, "arms": names},
    )
    record = measurement.record()
    records.publish(record)
    return record
