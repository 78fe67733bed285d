"""Fits to the published runs of MLPerf RNN-T, and the time to train that follows from them."""

import math
from dataclasses import replace

import pytest

from asrkit.workbench.cost import (
    DGX_A100,
    EpochFit,
    Link,
    StepFit,
    all_reduce_s,
    cluster_all_reduce_s,
    critical_batch,
    fastest,
    fit_epochs,
    fit_steps,
    predict,
    published_runs,
    without_buckets,
)
from asrkit.workbench.cost.scaling import EPOCH

LINK = Link(latency_s=1e-6, bytes_per_s=1e9)


@pytest.fixture(scope="module")
def one_recipe():
    return without_buckets(published_runs())


def test_one_recipe_leaves_out_buckets_and_the_run_that_was_aborted(one_recipe):
    runs = published_runs()
    assert (len(runs), len(one_recipe)) == (140, 119)
    counts = {(run.round, run.gpu, run.gpus) for run in runs}
    assert {("v2.0", "a30", 2), ("v1.1", "a100", 1536), ("v2.1", "h100", 32)} <= counts


def test_a_line_is_found_again(one_recipe):
    on_a_line = [replace(run, epochs=30 + 0.01 * run.batch) for run in one_recipe]
    fit = fit_epochs(on_a_line)
    assert fit.least == pytest.approx(30)
    assert fit.critical_batch == pytest.approx(3000)
    assert fit.epochs(fit.critical_batch) == pytest.approx(2 * fit.least)


def test_the_interval_of_the_critical_batch_holds_it_and_is_repeatable(one_recipe):
    found = critical_batch(one_recipe, draws=200)
    assert found.low < found.middle < found.high
    assert found == critical_batch(one_recipe, draws=200)
    assert found.middle == fit_epochs(one_recipe).critical_batch


def test_steps_that_follow_the_model_are_fitted_exactly(one_recipe):
    made = StepFit(0.02, 0.001)
    a100 = [run for run in one_recipe if run.gpu == "a100"]
    follow = []
    for run in a100:
        step_s = made.seconds(batch=run.batch, gpus=run.gpus)
        follow.append(replace(run, utterances_per_s=run.batch / step_s))
    fit = fit_steps(follow)
    assert fit.fixed_s == pytest.approx(made.fixed_s)
    assert fit.per_utterance_s == pytest.approx(made.per_utterance_s)


def test_published_minutes_are_predicted_within_a_fifth(one_recipe):
    epoch_fit = fit_epochs(one_recipe)
    a100 = [run for run in one_recipe if run.gpu == "a100"]
    step_fit = fit_steps(a100)
    for batch, gpus in {(run.batch, run.gpus) for run in a100}:
        alike = [run.minutes for run in a100 if (run.batch, run.gpus) == (batch, gpus)]
        measured = sum(alike) / len(alike)
        predicted = predict(gpus, batch, epoch_fit, step_fit).minutes
        assert predicted == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("gpus", [1, 8, 64, 1536])
def test_no_other_batch_is_faster_than_the_fastest(one_recipe, gpus):
    epoch_fit = fit_epochs(one_recipe)
    step_fit = fit_steps([run for run in one_recipe if run.gpu == "a100"])
    best = fastest(gpus, epoch_fit, step_fit)
    for factor in (0.5, 0.9, 1.1, 2.0):
        batch = max(gpus, round(factor * best.batch))
        assert predict(gpus, batch, epoch_fit, step_fit).minutes >= best.minutes


def test_minutes_of_a_run_are_those_of_its_steps(one_recipe):
    run = replace(one_recipe[0], batch=2048, epochs=10.0, utterances_per_s=2048.0)
    assert run.minutes == pytest.approx(10 * EPOCH / 2048 / 60)


def test_switches_need_half_of_a_rings_time_where_bandwidth_is_the_limit():
    ring = all_reduce_s("ring", size=1e12, ranks=1000, link=LINK)
    switches = all_reduce_s("switches", size=1e12, ranks=1000, link=LINK)
    assert ring / switches == pytest.approx(2, rel=2e-3)


def test_a_ring_waits_in_proportion_to_ranks_and_a_tree_to_their_logarithm():
    seconds = {
        name: all_reduce_s(name, size=0, ranks=1024, link=LINK)
        for name in ("ring", "tree")
    }
    assert seconds["ring"] == pytest.approx(2 * 1023 * LINK.latency_s)
    assert seconds["tree"] == pytest.approx(2 * math.log2(1024) * LINK.latency_s)


def test_a_ring_of_a_cluster_moves_each_byte_as_one_ring_of_its_machine_does():
    one = cluster_all_reduce_s("ring", size=8e9, gpus=8)
    assert one == pytest.approx(
        all_reduce_s("ring", size=8e9, ranks=8, link=DGX_A100.inside)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: all_reduce_s("rings", size=1, ranks=2, link=LINK),
            "algorithm: expected one of",
        ),
        (
            lambda: cluster_all_reduce_s("ring", size=1, gpus=12),
            "gpus: expected up to 8, or a",
        ),
        (
            lambda: predict(64, 63, EpochFit(30.0, 0.01), StepFit(0.02, 0.001)),
            "batch: expected an utterance for each of 64 GPUs",
        ),
        (lambda: fit_epochs([]), "runs: expected two batch sizes at least"),
        (lambda: fit_steps(published_runs()), "runs: expected runs on one kind of GPU"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
