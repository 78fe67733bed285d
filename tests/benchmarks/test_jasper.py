"""Jasper at a small size: its tables, training steps, and the claims about them."""

from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from asrkit.models import CTCModel, presets
from asrkit.workbench.claims import load_claims
from asrkit.workbench.lessons.shared.jasper import random_jasper
from asrkit.workbench.measure import Timing
from benchmarks.__main__ import main
from benchmarks.harness.runner import run
from benchmarks.peers.peer_engines import WholeUtterances
from benchmarks.peers.processes import PYTHON
from benchmarks.suites import SUITES, jasper

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = presets.mini_jasper()


@pytest.fixture(scope="module")
def small():
    return random_jasper(SMALL, "cpu")


def test_the_studies_record_the_claims_that_need_a_gpu():
    """A rehearsal on a CPU, which settles nothing."""
    first, *_, last = SMALL.encoder.stages
    few = replace(SMALL, encoder=replace(SMALL.encoder, stages=(first, last)))
    cases = jasper.claims(random_jasper(few, "cpu"), "cpu", True)
    measured = [
        measurement.record() for case in cases for measurement in case.measure()
    ]
    claims = {claim.id: claim for claim in load_claims()}
    found = {record["what"]: record for record in measured if record["what"] in claims}
    assert {*found} == {*jasper.LATENCY, *jasper.TRAINING}
    for name, record in found.items():
        claim = claims[name]
        params = record["params"]
        assert record["metric"] == claim.metric
        assert record["unit"] == claim.unit
        assert [*params.get("arms", ())] == [*claim.arms]
        assert params["quick"]
        assert params["device"] == "cpu"
        assert claim.needs == "cuda"
        assert "python -m benchmarks encoders --device cuda" in claim.notes


def test_a_training_step_lowers_the_loss_and_does_not_change_the_model():
    small = CTCModel(SMALL)
    before = [weight.clone() for weight in small.parameters()]
    step = jasper.training_step(small, 2, 60, mixed=False)
    losses = [step().item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, before, small.parameters()))


def timing(*samples):
    return Timing(samples_ms=samples, warmup=0, timer="none")


def test_the_table_of_latencies_has_published_percentiles_and_is_resumed(
    monkeypatch, tmp_path
):
    """A cell is measured again with other calls or by another commit; one cell has claims."""
    times = {"float32": timing(*range(1, 101)), "float16": timing(*[25.0] * 100)}
    sizes = []

    def latencies(model, B, seconds, precisions, *, repeats, warmup=16):
        if repeats > 1:
            sizes.append(B)
        return times

    def cells(*batch, iterations=100):
        options = {"batch": batch, "iterations": iterations, "seconds": [0.6]}
        out = tmp_path / "bench.jsonl"
        return run(
            "jasper-inference", quick=True, precisions=[*times], out=out, **options
        )

    monkeypatch.setattr(jasper, "latencies", latencies)
    assert {record["what"] for record in cells(4)} == {"jasper-latency"}
    records = cells(2, 4)
    assert sizes == [4, 2]
    claimed = {"jasper-latency-a100", "jasper-fp16-fp32"}
    assert {record["what"] for record in records} == claimed | {"jasper-latency"}
    first, second = SUITES["jasper-inference"].rows(records)
    assert second == first | {"batch": 4} == {
        "seconds": 0.6, "batch": 4, "float32: 90 %, ms": 91, "float32: 95 %, ms": 95,
        "float32: 99 %, ms": 99, "float32: mean, ms": 50.5, "float16: 90 %, ms": 25.0,
        "float16: 95 %, ms": 25.0, "float16: 99 %, ms": 25.0, "float16: mean, ms": 25.0,
        "float16: speed-up over float32": 2.02,
    }  # fmt: skip
    cells(4, iterations=50)
    other = {"commit": "0" * 40, "dirty": False, "argv": []}
    monkeypatch.setattr("asrkit.workbench.records.code", lambda: other)
    cells(4)
    assert sizes == [4, 2, 4, 4]


def test_the_last_line_counts_new_records_and_the_cells_of_an_earlier_run(
    monkeypatch, tmp_path, capsys
):
    times = {"float32": timing(2.0), "bfloat16": timing(1.0)}
    monkeypatch.setattr(jasper, "latencies", lambda *sizes, **options: times)

    def last_line(*batch):
        options = ["--quick", "--threads", "1", "--out", str(tmp_path / "bench.jsonl")]
        assert main(["jasper-inference", *options, "--batch", *batch]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert last_line("1").startswith("2 records appended to ")
    two = last_line("1", "2")
    assert two.startswith("2 records appended to ")
    assert two.endswith("; 1 cell already measured")
    three = last_line("1", "2")
    assert three.startswith("0 records appended to ")
    assert three.endswith("; 2 cells already measured")


@pytest.mark.parametrize("suite, option, message", [
    ("jasper-inference", {"batch": [0]}, "batch: expected at least 1"),
    ("jasper-inference", {"seconds": [0.0]}, "seconds: expected 0.1 to 3,600"),
    ("jasper-inference", {"seconds": [2.0, float("inf")]}, "seconds: expected 0.1 to"),
    ("jasper-inference", {"seconds": [2.0, float("nan")]}, "seconds: expected 0.1 to"),
    ("jasper-inference", {"iterations": 0}, "iterations: expected at least 1"),
    ("jasper-training", {"processes": [999]}, "processes: expected 1 to"),
    ("jasper-training", {"processes": [0]}, "processes: expected 1 to"),
    ("jasper-seeds", {"seeds": 0}, "seeds: expected at least 1"),
])  # fmt: skip
def test_a_bad_size_of_a_table_is_refused(suite, option, message):
    with pytest.raises(ValueError, match=message):
        run(suite, quick=True, **option)


def test_more_threads_than_cores_are_refused_by_their_name(monkeypatch):
    monkeypatch.setattr(jasper, "usable_cores", lambda: 0)
    with pytest.raises(ValueError, match="^threads: expected at most 0"):
        run("jasper-training", quick=True)


def test_the_table_of_training_counts_the_utterances_of_all_processes(monkeypatch):
    times = {
        1: {"tf32": timing(100.0), "mixed": timing(50.0)},
        2: {"tf32": timing(125.0), "mixed": timing(50.0)},
    }
    monkeypatch.setattr(
        jasper, "by_torchrun", lambda processes, params: times[processes]
    )
    monkeypatch.setattr(jasper, "usable_cores", lambda: 2)
    records = run("jasper-training", quick=True, batch=[4])
    rows = SUITES["jasper-training"].rows(records)
    assert "mixed: speed-up over float32" in rows[0]
    assert [[*row.values()][2:] for row in rows] == [
        [
            1,
            40.0,
            1.0,
            80.0,
            1.0,
            2.0,
        ],  # processes; float32, mixed: rate, scaling; speed-up
        [2, 64.0, 1.6, 160.0, 2.0, 2.5],
    ]


@pytest.mark.live
def test_processes_of_torchrun_train_together_and_one_that_fails_is_reported():
    params = {"preset": "mini_jasper", "device": "cpu", "threads": 1}
    params |= {"batch": 1, "duration_s": 0.5, "steps": 2}
    for processes in (1, 2):
        times = jasper.by_torchrun(processes, params)
        assert [len(arm.samples_ms) for arm in times.values()] == [2, 2]
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        jasper.by_torchrun(1, params | {"preset": "nothing"})


def test_a_model_without_lengths_is_the_model_on_a_whole_utterance(small):
    for T in (1, 2, 31):
        features = torch.randn(1, T, 80)
        wanted, _ = small(features, torch.tensor([T]))
        torch.testing.assert_close(WholeUtterances(small)(features), wanted)


@pytest.mark.live
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
def test_the_peers_that_are_installed_are_the_pinned_ones_and_none_sends_telemetry():
    def pairs(found):
        return {(name.replace("_", "-"), version) for name, version in found}

    root = Path(jasper.__file__).parents[2]
    lines = (root / "requirements-peers.txt").read_text(encoding="utf-8").splitlines()
    (packages,) = PYTHON.parents[1].glob("lib/python*/site-packages")
    installed = distributions(path=[str(packages)])
    found = pairs((package.metadata["Name"], package.version) for package in installed)
    assert pairs(line.split("==") for line in lines if "==" in line) <= found
    # what NeMo imports sends nothing unless somebody gives it an exporter
    senders = {name for name, _ in found if "telemetry" in name}
    assert senders <= {"nv-one-logger-training-telemetry"}
