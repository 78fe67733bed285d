"""Gains of rungs."""

from asrkit.workbench.lessons.ten_x import gains


def test_gains_are_ratios_within_a_repeat_so_that_a_slow_repeat_changes_nothing():
    samples = {"": [8.0, 80.0, 8.0], "a": [4.0, 40.0, 4.0], "b": [2.0, 20.0, 2.0]}
    first, second = gains(samples)
    assert (first.rung, first.total, first.step) == ("a", (2, 2, 2), (2, 2, 2))
    assert (second.rung, second.total, second.step) == ("b", (4, 4, 4), (2, 2, 2))


def test_the_median_lies_within_its_quartiles():
    (gain,) = gains({"": [1.0, 2.0, 3.0, 4.0, 9.0], "a": [1.0] * 5})
    assert gain.total == (2.0, 3.0, 4.0)


def test_repeats_that_both_arms_have_are_compared():
    (gain,) = gains({"baseline": [4.0, 6.0, 9.0], "fast": [2.0, 2.0]})
    assert (gain.rung, gain.total.middle) == ("fast", 2.5)
