"""Fits to the published runs of MLPerf RNN-T, and the time to train that follows from them."""

import numpy as np
import pytest

from asrkit.workbench.cost.scaling import (
    EPOCH,
    NVLINK,
    Link,
    StepFit,
    all_reduce_s,
    critical_batch_interval,
    fastest_batch,
    fit_epochs,
    fit_steps,
    gradients_sum_s,
    minutes_to_train,
    published_runs,
)

LINK = Link(latency_s=1e-6, bytes_per_s=1e9)


@pytest.fixture(scope="module")
def one_recipe():
    return published_runs().query("reached and buckets == 1")


@pytest.fixture(scope="module")
def on_a100(one_recipe):
    return one_recipe.query("gpu == 'a100'")


def test_published_runs_are_read_with_their_gpus_and_minutes(one_recipe):
    runs = published_runs()
    assert len(runs) == 140
    assert len(one_recipe) == 119
    sizes = {*zip(runs["gpu"], runs["gpus"], strict=True)}
    assert {("a30", 2), ("a100", 1536), ("h100", 32)} <= sizes
    minutes = runs["epochs"] * EPOCH / runs["batch"] * runs["step_s"] / 60
    assert np.allclose(runs["minutes"], minutes)


def test_a_line_is_found_again(one_recipe):
    fit = fit_epochs(one_recipe.assign(epochs=30 + 0.01 * one_recipe["batch"]))
    assert fit.least == pytest.approx(30)
    assert fit.critical_batch == pytest.approx(3000)
    assert fit.epochs(fit.critical_batch) == pytest.approx(2 * fit.least)


def test_the_interval_of_the_critical_batch_holds_it_and_is_repeatable(one_recipe):
    low, high = critical_batch_interval(one_recipe, draws=200)
    assert low < fit_epochs(one_recipe).critical_batch < high
    assert (low, high) == critical_batch_interval(one_recipe, draws=200)


def test_steps_that_follow_the_model_are_fitted_exactly(on_a100):
    made = StepFit(0.02, 0.001)
    sizes = zip(on_a100["batch"], on_a100["gpus"], strict=True)
    seconds = [made.seconds(batch=batch, gpus=gpus) for batch, gpus in sizes]
    fit = fit_steps(on_a100.assign(step_s=seconds))
    assert fit.fixed_s == pytest.approx(made.fixed_s)
    assert fit.per_utterance_s == pytest.approx(made.per_utterance_s)


def test_published_minutes_are_predicted_within_a_fifth(one_recipe, on_a100):
    fits = fit_epochs(one_recipe), fit_steps(on_a100)
    for (batch, gpus), alike in on_a100.groupby(["batch", "gpus"]):
        predicted = minutes_to_train(gpus, batch, *fits)
        assert predicted == pytest.approx(alike["minutes"].mean(), rel=0.2)


@pytest.mark.parametrize("gpus", [1, 8, 64, 1536])
def test_no_other_batch_is_faster_than_the_fastest(one_recipe, on_a100, gpus):
    fits = fit_epochs(one_recipe), fit_steps(on_a100)
    best = fastest_batch(gpus, *fits)
    for factor in (0.5, 0.9, 1.1, 2.0):
        batch = max(gpus, round(factor * best))
        minutes = minutes_to_train(gpus, batch, *fits)
        assert minutes >= minutes_to_train(gpus, best, *fits)


def seconds(algorithm, size, ranks):
    return all_reduce_s(algorithm, size=size, ranks=ranks, link=LINK)


def test_switches_need_half_of_a_rings_time_where_bandwidth_is_the_limit():
    ring, switches = (seconds(one, 1e12, 1000) for one in ("ring", "switches"))
    assert ring / switches == pytest.approx(2, rel=2e-3)


def test_a_ring_waits_in_proportion_to_ranks_and_a_tree_to_their_logarithm():
    assert seconds("ring", 0, 1024) == pytest.approx(2 * 1023 * LINK.latency_s)
    assert seconds("tree", 0, 1024) == pytest.approx(2 * 10 * LINK.latency_s)


def test_a_ring_of_a_cluster_moves_each_byte_as_one_ring_of_its_machine_does():
    one = gradients_sum_s("ring", 8, size=8e9)
    assert one == pytest.approx(all_reduce_s("ring", size=8e9, ranks=8, link=NVLINK))


def test_gpus_that_fill_no_machines_are_refused():
    with pytest.raises(ValueError, match="gpus: expected up to 8, or a multiple"):
        gradients_sum_s("ring", 12)
