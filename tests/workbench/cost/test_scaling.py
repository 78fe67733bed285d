"""Fits to the published runs of MLPerf RNN-T, and the time to train that follows from them."""

import numpy as np
import pytest

from asrkit.workbench.cost.scaling import (
    EPOCH,
    NETWORK,
    NVLINK,
    StepFit,
    fastest_batch,
    fit_epochs,
    fit_steps,
    gradients_sum_s,
    minutes_to_train,
    published_runs,
    resampled,
)


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


def test_a_line_is_recovered(one_recipe):
    fit = fit_epochs(one_recipe.assign(epochs=30 + 0.01 * one_recipe["batch"]))
    assert fit.least == pytest.approx(30)
    assert fit.critical_batch == pytest.approx(3000)
    assert fit.epochs(fit.critical_batch) == pytest.approx(2 * fit.least)


def test_samples_have_as_many_runs_of_each_system_and_batch(one_recipe):
    systems = ["gpu", "gpus", "batch"]
    wanted = one_recipe.value_counts(systems)
    first, second = resampled(one_recipe, draws=2)
    assert first.value_counts(systems).to_dict() == wanted.to_dict()
    assert not first["epochs"].equals(second["epochs"])
    (again,) = resampled(one_recipe, draws=1)
    assert first.equals(again)
    critical = [
        fit_epochs(sample).critical_batch for sample in resampled(one_recipe, draws=50)
    ]
    assert min(critical) < fit_epochs(one_recipe).critical_batch < max(critical)


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


def test_a_ring_moves_each_byte_almost_twice_and_waits_for_every_rank():
    assert gradients_sum_s(1) == 0
    assert gradients_sum_s(8, size=0) == pytest.approx(14 * NVLINK.latency_s)
    bytes_s = gradients_sum_s(8, size=8e9) - gradients_sum_s(8, size=0)
    assert bytes_s == pytest.approx(14e9 / NVLINK.bytes_per_s)


def test_trees_across_machines_wait_for_their_levels_and_move_each_byte_twice():
    waiting_s, all_s = (
        gradients_sum_s(8 * 128, size=size) - gradients_sum_s(8, size=size)
        for size in (0, 8e9)
    )
    assert waiting_s == pytest.approx(2 * 7 * NETWORK.latency_s)
    assert all_s - waiting_s == pytest.approx(2e9 / NETWORK.bytes_per_s)


def test_gpus_that_fill_no_machines_are_refused():
    with pytest.raises(ValueError, match="gpus: expected up to 8, or a multiple"):
        gradients_sum_s(12)
