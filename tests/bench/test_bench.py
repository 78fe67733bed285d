"""The suites at their smallest: all run, all arms agree, records are whole, and a wrong arm leaves no record."""

from dataclasses import replace

import pytest
import torch

from asrkit import bench, records
from asrkit.decoders import ctc_greedy

PAIRS = {
    "losses": {"rnnt-loss-wavefront": ["torchaudio", "wavefront"]},
    "decoding": {"ctc-greedy-batched": ["sequential", "batched"], "transducer-frame-looping": ["one_by_one", "frame_looping"]},
    "features": {"feature-norm-batched": ["sequential", "batched"]},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small arms on several threads mostly wait for each other, and for whoever else uses the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("suite", bench.SUITES)
def test_a_quick_suite_measures_every_arm_and_pairs_the_last_two(suite, tmp_path):
    state = torch.get_rng_state()
    out = tmp_path / "records.jsonl"
    found = bench.run(suite, out=out, quick=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert records.read(out) == found
    assert records.verify([out]) == []
    ratios = [record for record in found if record["metric"] == "ratio"]
    assert {record["what"]: record["params"]["arms"] for record in ratios} == PAIRS[suite]
    for record in ratios:
        slow, fast = record["params"]["arms"]
        arms = {
            one["impl"]: one["samples"]
            for one in found
            if (one["what"], one["metric"], one["params"]["shape"]) == (record["what"], "latency", record["params"]["shape"])
        }
        assert record["samples"] == pytest.approx([a / b for a, b in zip(arms[slow], arms[fast], strict=True)])
        assert {"threads", "dtype", "device", "shape"} <= {*record["params"]}
    if suite == "losses":
        assert {one["impl"] for one in found if one["metric"] == "peak_memory"} == {"reference", "torchaudio", "wavefront"}


def test_arms_that_disagree_are_not_measured(tmp_path, monkeypatch):
    (good, *_) = bench.SUITES["decoding"]("cpu", True)
    found = ctc_greedy(torch.zeros(1, 1, 2), torch.tensor([1]))
    for field, wrong in (("labels", found.labels + 1), ("scores", found.scores + 1)):
        bad = replace(good, arms={"right": lambda: found, "wrong": lambda f=field, w=wrong: replace(found, **{f: w})})
        monkeypatch.setitem(bench.SUITES, "bad", lambda device, quick, bad=bad: iter([bad]))
        with pytest.raises(AssertionError, match="wrong disagrees with right, so nothing was measured"):
            bench.run("bad", out=tmp_path / "none.jsonl", quick=True)
    assert not (tmp_path / "none.jsonl").exists()


def test_the_table_has_a_line_a_record_in_aligned_columns():
    found = bench.run("features", quick=True)
    head, *lines = bench.table(found)
    assert len(lines) == len(found) == 3
    assert [line.index("8×200×80") for line in lines] == [head.index("shape")] * 3
    assert "sequential / batched" in lines[-1]
    assert "GB/s" in lines[0]


def test_an_unknown_suite_is_one_line():
    with pytest.raises(ValueError) as error:
        bench.run("speed")
    assert str(error.value) == "suite: expected one of 'losses', 'decoding', 'features', got 'speed'."
