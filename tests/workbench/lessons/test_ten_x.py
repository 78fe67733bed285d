"""What rungs gain, from times in memory and from the shipped records."""

from asrkit import files
from asrkit.workbench import records
from asrkit.workbench.lessons.ten_x import gains


def test_gains_are_ratios_within_a_repeat_so_that_a_slow_repeat_changes_nothing():
    samples = {"": [8.0, 80.0, 8.0], "a": [4.0, 40.0, 4.0], "b": [2.0, 20.0, 2.0]}
    first, second = gains(samples)
    assert (first.rung, first.total, first.step) == ("a", (2, 2, 2), (2, 2, 2))
    assert (second.rung, second.total, second.step) == ("b", (4, 4, 4), (2, 2, 2))


def test_the_median_lies_within_its_quartiles():
    (gain,) = gains({"": [1.0, 2.0, 3.0, 4.0, 9.0], "a": [1.0] * 5})
    assert gain.total == (2.0, 3.0, 4.0)


def test_gains_of_recorded_times_are_the_ratios_that_the_same_run_recorded():
    shipped = records.read(files.shipped("records"))
    baseline = records.newest_run(shipped, "ladder-rnnt", how="baseline")
    rungs = records.newest_run(shipped, "ladder-rnnt", how="cumulative")
    run = [*baseline.values(), *rungs.values()]
    found = gains({record["params"]["rung"]: record["samples"] for record in run})
    assert len(found) >= 8
    recorded = {
        (*record["params"]["arms"], record["value"])
        for record in shipped
        if record["what"] == "ladder-rnnt" and record["metric"] == "ratio"
    }
    for below, gain in zip(["baseline", *rungs], found, strict=False):
        arm = f"to_{gain.rung}"
        assert ("baseline", arm, gain.total.middle) in recorded
        assert (below, arm, gain.step.middle) in recorded


def test_repeats_that_both_arms_have_are_compared():
    (gain,) = gains({"baseline": [4.0, 6.0, 9.0], "fast": [2.0, 2.0]})
    assert (gain.rung, gain.total.middle) == ("fast", 2.5)
