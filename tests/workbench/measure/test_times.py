"""Interleaved timing: the order and number of calls, and statistics of the samples."""

import time

import pytest

from asrkit.workbench.measure import Sample, Timing, measure, ratio


def timing(*samples_ms):
    return Timing(samples_ms=samples_ms, warmup=0, timer="none")


def test_every_repeat_calls_all_arms_and_each_goes_first_in_turn():
    calls = []
    arms = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = measure(arms, repeats=4, warmup=2)
    assert "".join(calls) == "bcacababcbcacababc"
    assert [*found] == ["a", "b", "c"]
    for one in found.values():
        assert len(one.samples_ms) == 4
        assert one.warmup == 2
        assert one.timer == "time.perf_counter_ns"


def test_an_error_of_an_arm_is_raised():
    with pytest.raises(ZeroDivisionError):
        measure({"bad": lambda: 1 / 0}, repeats=1)


def test_cpu_time_and_the_setup_before_every_call_are_not_part_of_the_time(monkeypatch):
    clock = {"perf_counter_ns": 0, "process_time_ns": 0}
    for name in clock:
        monkeypatch.setattr(time, name, lambda name=name: clock[name])

    def passes(ms, cpu_ms):
        clock["perf_counter_ns"] += ms * 10**6
        clock["process_time_ns"] += cpu_ms * 10**6

    made = []
    found = measure(
        {"a": lambda number: passes(30, 20 + number)},
        setups={"a": lambda: passes(500, 500) or made.append(1) or len(made)},
        repeats=3,
        warmup=1,
    )
    assert found["a"].samples_ms == (30, 30, 30)
    assert found["a"].cpu_ms == (22, 23, 24)


def test_slow_arms_get_few_repeats():
    seconds = {"fast": 0.1, "middle": 4, "slow": 31, "slowest": 100}
    with_own_timing = {
        name: lambda s=s: Sample(wall_ms=1e3 * s, cpu_ms=None)
        for name, s in seconds.items()
    }
    found = measure(with_own_timing, repeats=20, warmup=4, enough_s=10, most_s=60)
    assert [len(one.samples_ms) for one in found.values()] == [20, 3, 2, 1]
    assert [one.warmup for one in found.values()] == [4, 3, 1, 1]
    assert found["slow"].samples_ms == (31e3, 31e3)
    assert found["slow"].cpu_ms is None
    assert len(ratio(found, "slow", "fast")) == 2


def test_ratios_pair_the_repeats():
    timings = {"slow": timing(6.0, 9.0), "fast": timing(2.0, 1.0)}
    assert ratio(timings, "slow", "fast") == (3, 9)


@pytest.mark.parametrize("changed, wanted", [
    ({"arms": {}}, "arms: expected at least one callable, got {}."),
    ({"repeats": 0}, "repeats, warmup: expected repeats >= 1 and warmup >= 0, got (0, 3)."),
])  # fmt: skip
def test_bad_input_is_one_line(changed, wanted):
    with pytest.raises(ValueError) as error:
        measure(**{"arms": {"a": int}, **changed})
    assert str(error.value) == wanted


@pytest.mark.gpu
def test_cuda_is_timed_by_events():
    import torch

    x = torch.ones(1000, 1000, device="cuda")
    found = measure({"matmul": lambda: x @ x}, repeats=3, device="cuda")["matmul"]
    assert found.timer == "torch.cuda.Event"
    assert min(found.samples_ms) > 0
