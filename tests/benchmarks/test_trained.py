"""Suites that train small models: their records and tables, and what a second run does not train."""

from dataclasses import replace
from statistics import mean, pstdev

import pytest

from benchmarks.harness.runner import run
from benchmarks.suites import SUITES, trained

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def little(monkeypatch, tmp_path, tiny_speech):
    """Two steps on thirty utterances, scored on three of them."""
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    monkeypatch.setattr(trained, "QUICK_STEPS", 2)
    sets = dict.fromkeys(("dev", "test"), tiny_speech.select(range(3)))
    sets["train"] = tiny_speech
    monkeypatch.setattr(trained, "speech", lambda quick: sets)
    return {"quick": True, "out": tmp_path / "bench.jsonl"}


def test_seeds_have_their_own_rates_and_a_finished_one_is_not_trained_again(
    little, monkeypatch
):
    run("jasper-seeds", seeds=1, **little)
    rates = iter([0.5, 0.25])
    plain = trained.word_errors

    def other_errors(*arguments):
        rate = next(rates)
        return [replace(one, value=rate) for one in plain(*arguments)]

    monkeypatch.setattr(trained, "word_errors", other_errors)
    records = run("jasper-seeds", seeds=3, **little)
    for row in SUITES["jasper-seeds"].rows(records):
        assert (row["seed 2"], row["seed 3"]) == (50.0, 25.0)
        three = [row[f"seed {seed}"] for seed in (1, 2, 3)]
        assert row["mean"] == pytest.approx(mean(three))
        assert row["std"] == pytest.approx(pstdev(three))
    monkeypatch.setattr(trained, "trained", None)
    assert run("jasper-seeds", seeds=3, **little) == records


def test_the_pair_has_equal_parameters_and_both_are_scored_and_timed(little):
    records = run("encoder-decoder", **little)
    rows = SUITES["encoder-decoder"].rows(records)
    assert [(row["encoder layers"], row["decoder layers"]) for row in rows] == 2 * [
        (2, 4),
        (4, 1),
    ]
    deep, shallow = (row["parameters"] for row in rows[:2])
    assert deep == pytest.approx(shallow, rel=0.01)
    timed = {"dev: WER, %", "test: WER, %", "test set, ms", "RTFx"}
    assert all(timed <= row.keys() for row in rows)
    ratio = "time of 2 + 4 layers over this"
    assert [ratio in row for row in rows] == 2 * [False, True]
    ratios = [record for record in records if record["metric"] == "ratio"]
    assert [record["params"]["arms"] for record in ratios] == 2 * [["deep", "shallow"]]
