"""The simulation of many workers: closed forms where there are any, and what has to hold for all."""

from dataclasses import replace
from math import exp, inf
from statistics import mean

import pytest

from asrkit.workbench.cost import Fleet, equal_shards, simulate


def names(outcome):
    """Numbers of the shards that were heard, sorted."""
    return sorted(one.shard for one in outcome.done)


def test_one_worker_without_failures_takes_the_audio_over_its_rtfx():
    outcome = simulate(equal_shards(10.5, 1.0), Fleet(workers=1, rtfx=50.0, startup_s=7.0))
    assert outcome.seconds == pytest.approx(7 + 10.5 * 3600 / 50)
    assert outcome.days == pytest.approx(outcome.seconds / 86_400)
    assert (outcome.failures, outcome.lost_s, outcome.idle_s) == (0, 0.0, 0.0)
    assert outcome.utilisation == pytest.approx(1 - 7 / outcome.seconds)
    assert [one.shard for one in outcome.done] == [*range(11)]


@pytest.mark.parametrize("order", ["parts", "queue"])
@pytest.mark.parametrize("workers", [1, 2, 7, 40])
def test_every_shard_is_heard_once_and_the_time_adds_up(order, workers):
    fleet = Fleet(workers=workers, rtfx=20.0, spread=0.3, startup_s=30.0, failure_h=0.1, seed=3, order=order)  # fmt: skip
    outcome = simulate([900.0, 700.0, 600.0] + [500.0] * 30, fleet)
    assert names(outcome) == [*range(33)]
    assert [one.at_s for one in outcome.done] == sorted(one.at_s for one in outcome.done)
    # all workers' time is starting, hearing, what failures lost, and waiting for the last one
    fast = simulate([900.0, 700.0, 600.0] + [500.0] * 30, replace(fleet, failure_h=inf))
    assert fast.failures == fast.lost_s == 0
    assert (outcome.lost_s > 30.0 * outcome.failures) == (outcome.failures > 0)
    heard_s = outcome.paid_s - outcome.lost_s - outcome.idle_s - workers * 30.0
    if order == "parts":  # each worker hears the same shards with and without failures
        assert heard_s == pytest.approx(fast.paid_s - fast.idle_s - workers * 30.0)
    slowest = min(900.0, 33 * 500.0) / (20.0 * workers)
    assert heard_s > slowest and 0 < outcome.utilisation < 1


def test_parts_take_every_nth_shard_and_a_queue_is_taken_by_whoever_is_free():
    shards = [10.0, 9.0, 8.0, 7.0, 1.0, 1.0]
    parts = simulate(shards, Fleet(workers=2, rtfx=1.0))
    assert [one.shard for one in parts.done if one.worker == 0] == [0, 2, 4]
    assert [one.shard for one in parts.done if one.worker == 1] == [1, 3, 5]
    assert parts.seconds == 19.0 and parts.idle_s == 2.0
    queue = simulate(shards, Fleet(workers=2, rtfx=1.0, order="queue"))
    assert [tuple(one) for one in queue.done] == [
        (9.0, 1, 1), (10.0, 0, 0), (17.0, 0, 3), (17.0, 1, 2), (18.0, 0, 4), (18.0, 1, 5),
    ]  # fmt: skip


def test_more_workers_than_shards_wait():
    for order in ("parts", "queue"):
        outcome = simulate([6.0, 4.0], Fleet(workers=5, rtfx=2.0, startup_s=1.0, order=order))
        assert outcome.seconds == 4.0 and outcome.idle_s == 1.0 + 3 * 3.0


@pytest.mark.parametrize("restart_h", [0.0, 0.1])
@pytest.mark.parametrize("shard_h", [0.3, 1.0, 2.0])
def test_with_failures_a_shard_takes_its_known_mean_time(shard_h, restart_h):
    # A task of d hours, lost at the rate 1/m and begun again after r: (m + r)(e^(d/m) - 1).
    fleet = Fleet(workers=1, rtfx=1.0, failure_h=1.0, startup_s=restart_h * 3600)
    shards = 4000
    outcome = simulate([shard_h * 3600] * shards, fleet)
    wanted_h = (1.0 + restart_h) * (exp(shard_h) - 1)
    assert (outcome.seconds / 3600 - restart_h) / shards == pytest.approx(wanted_h, rel=0.1)
    # failures of a shard are geometric: e^(d/m) - 1 of them on average
    assert outcome.failures / shards == pytest.approx(exp(shard_h) - 1, rel=0.1)
    lost_h = outcome.lost_s / 3600 / shards
    assert lost_h == pytest.approx(wanted_h - shard_h, rel=0.15)


def test_workers_of_unequal_speed_are_as_fast_together_and_a_queue_wastes_less():
    shards = equal_shards(1000, 0.5)
    even = simulate(shards, Fleet(workers=20, rtfx=30.0))
    parts = simulate(shards, Fleet(workers=20, rtfx=30.0, spread=0.2))
    queue = simulate(shards, Fleet(workers=20, rtfx=30.0, spread=0.2, order="queue"))
    assert even.seconds < queue.seconds < 1.05 * even.seconds < parts.seconds
    assert parts.idle > 5 * queue.idle
    rates = [sum(0.5 for one in queue.done if one.worker == worker) for worker in range(20)]
    assert 0.1 < (max(rates) - min(rates)) / mean(rates) < 2  # the faster one hears more


def test_the_same_seed_gives_the_same_and_another_one_something_else():
    fleet = Fleet(workers=3, rtfx=10.0, spread=0.2, failure_h=1.0)
    shards = equal_shards(100, 1.0)
    assert simulate(shards, fleet) == simulate(shards, fleet)
    assert simulate(shards, fleet) != simulate(shards, replace(fleet, seed=1))


def test_equal_shards_hold_all_hours():
    assert equal_shards(10, 4) == [4 * 3600, 4 * 3600, 2 * 3600]
    assert equal_shards(8, 4) == [4 * 3600] * 2
    assert equal_shards(1, 4) == [3600]
    assert len(equal_shards(1e6, 20)) == 50_000
    assert sum(equal_shards(1e6, 0.7 * 11)) == pytest.approx(3.6e9)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"workers": 0}, "^workers: expected a whole number in 1..1,000,000, got 0"),
        ({"workers": 1.5}, "^workers: "),
        ({"rtfx": 0.0}, "^rtfx: expected above 0, got 0.0"),
        ({"rtfx": inf}, "^rtfx: expected a finite number"),
        ({"rtfx": float("nan")}, "^rtfx: "),
        ({"spread": -0.1}, "^spread: expected 0 to 1"),
        ({"startup_s": inf}, "^startup_s: expected 0 seconds or more"),
        ({"failure_h": 0.0}, "^failure_h: expected above 0"),
        ({"order": "random"}, "^order: expected one of parts, queue, got 'random'"),
    ],
)
def test_wrong_fleets_are_one_line(changed, said):
    with pytest.raises(ValueError, match=said):
        Fleet(**{"workers": 1, "rtfx": 1.0} | changed)


def test_plans_that_cannot_be_simulated_are_one_line():
    fleet = Fleet(workers=1, rtfx=1.0, failure_h=1.0)
    for shards in ([], [1.0, 0.0], [1.0, inf], [float("nan")]):
        with pytest.raises(ValueError, match="^shards: expected "):
            simulate(shards, fleet)
    simulate([5 * 3600.0], fleet)
    with pytest.raises(ValueError, match="^shard_h: expected shards that a worker transcribes in at most 5 hours.*Make smaller"):  # fmt: skip
        simulate([5.1 * 3600.0], fleet)
    with pytest.raises(ValueError, match="^shard_h: expected at most 1,000,000 shards, got"):
        equal_shards(1e9, 1.0)
    for hours in (0, -1, inf):
        with pytest.raises(ValueError, match="^hours: expected above 0"):
            equal_shards(hours, 1.0)
