"""What rungs gain, from timings in memory and from the shipped records."""

from asrkit import files
from asrkit.workbench import records
from asrkit.workbench.lessons.ten_x import (
    gains,
    recorded_gains,
    recorded_run,
    spread,
)
from asrkit.workbench.measure import Timing


def timing(*samples_ms):
    return Timing(
        samples_ms=samples_ms, cpu_ms=None, warmup=0, timer="time.perf_counter_ns"
    )


def test_the_median_lies_within_its_quartiles():
    low, middle, high = spread([1.0, 2.0, 3.0, 4.0, 9.0])
    assert (low, middle, high) == (2.0, 3.0, 4.0)


def test_gains_are_ratios_within_a_repeat_so_that_a_slow_repeat_changes_nothing():
    times = {
        "baseline": timing(8.0, 80.0, 8.0),
        "to_a": timing(4.0, 40.0, 4.0),
        "to_b": timing(2.0, 20.0, 2.0),
    }
    first, second = gains(times, {"": "baseline", "a": "to_a", "b": "to_b"})
    assert (first.rung, first.total, first.step) == ("a", (2, 2, 2), (2, 2, 2))
    assert (second.rung, second.total, second.step) == ("b", (4, 4, 4), (2, 2, 2))


def test_recorded_gains_are_those_of_the_records_of_one_run():
    run = recorded_run(records.read(files.shipped("records")), "ladder-rnnt")
    found = recorded_gains(run)
    assert len({record["machine"]["id"] for record in run}) == 1 and len(found) >= 8
    recorded = {
        record["params"]["rung"]: record["value"]
        for record in run
        if record["metric"] == "ratio"
        and record["params"]["how"] == "cumulative"
        and record["params"]["arms"][0] == "baseline"
    }
    assert {one.rung: one.total.middle for one in found} == recorded
    assert found[0].total == found[0].step


def test_a_ladder_without_records_has_no_run():
    assert recorded_run([], "ladder-rnnt") == []
