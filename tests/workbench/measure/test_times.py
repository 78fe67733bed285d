"""Interleaved timing: who is called when, how often, and what is made of the samples."""

import time

import pytest

from asrkit.workbench.measure import Sample, Timing, measure, ratio


def timing(*samples_ms):
    return Timing(samples_ms=samples_ms, warmup=0, timer="none")


def test_every_repeat_calls_all_arms_and_each_goes_first_in_turn():
    calls = []
    timings = measure(
        {name: lambda name=name: calls.append(name) for name in "abc"},
        repeats=4,
        warmup=2,
    )
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert rounds == ["bca", "cab", "abc", "bca", "cab", "abc"]
    for one in timings.values():
        assert (len(one.samples_ms), one.warmup, one.timer) == (
            4,
            2,
            "time.perf_counter_ns",
        )
        assert min(one.samples_ms) >= 0
    assert list(timings) == ["a", "b", "c"]


def test_an_arm_that_fails_is_heard():
    with pytest.raises(ZeroDivisionError):
        measure({"bad": lambda: 1 / 0}, repeats=1)


def test_work_is_told_from_waiting():
    def work():
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    found = measure(
        {"work": work, "wait": lambda: time.sleep(0.03)}, repeats=2, warmup=0
    )
    assert min(found["work"].cpu_ms) >= 20 > max(found["wait"].cpu_ms)
    assert min(found["wait"].samples_ms) >= 30


def test_a_setup_runs_before_every_call_and_outside_the_time():
    made = []
    calls = {"a": made.append}
    found = measure(
        calls, setups={"a": lambda: time.sleep(0.02) or len(made)}, repeats=3, warmup=1
    )
    assert made == [0, 1, 2, 3]
    assert sum(found["a"].samples_ms) < 3 * 20


def test_slow_arms_get_few_repeats():
    seconds = {"fast": 0.1, "middle": 4, "slow": 31, "slowest": 100}
    arms = {
        name: lambda s=s: Sample(wall_ms=1e3 * s, cpu_ms=None)
        for name, s in seconds.items()
    }  # timed elsewhere
    found = measure(arms, repeats=20, warmup=0, enough_s=10, most_s=60)
    assert [len(one.samples_ms) for one in found.values()] == [20, 3, 2, 1]
    assert found["slow"].samples_ms == (31e3, 31e3) and found["slow"].cpu_ms is None
    assert len(ratio(found, "slow", "fast")) == 2


def test_percentiles_interpolate_and_do_not_mind_the_order():
    one = timing(4.0, 2.0, 1.0, 3.0, 5.0)
    assert (one.median_ms, one.percentile_ms(25), one.percentile_ms(75)) == (3, 2, 4)
    assert (one.percentile_ms(20), one.percentile_ms(80)) == pytest.approx((1.8, 4.2))


def test_ratios_pair_the_repeats():
    assert ratio(
        {"slow": timing(6.0, 9.0), "fast": timing(2.0, 1.0)}, "slow", "fast"
    ) == (3, 9)


@pytest.mark.parametrize(("arguments", "wanted"), [
    ({"arms": {}}, "arms: expected at least one callable, got {}."),
    ({"repeats": 0}, "repeats, warmup: expected repeats >= 1 and warmup >= 0, got (0, 3)."),
    ({"device": "meta"}, "device: expected one of 'cpu', 'cuda', got 'meta'."),
])  # fmt: skip
def test_bad_input_is_one_line(arguments, wanted):
    with pytest.raises(ValueError) as error:
        measure(**{"arms": {"a": int}, **arguments})
    assert str(error.value) == wanted


@pytest.mark.gpu
def test_cuda_is_timed_by_events():
    import torch

    x = torch.ones(1000, 1000, device="cuda")
    found = measure({"matmul": lambda: x @ x}, repeats=3, device="cuda")["matmul"]
    assert found.timer == "torch.cuda.Event"
    assert min(found.samples_ms) > 0
