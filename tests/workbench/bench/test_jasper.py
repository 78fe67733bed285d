"""Jasper at a small size: latencies, training steps, and the claims that they are for."""

from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from asrkit.models import CTCModel, presets
from asrkit.workbench import bench
from asrkit.workbench.bench.peers.peer_engines import WholeUtterances
from asrkit.workbench.bench.peers.processes import PYTHON
from asrkit.workbench.bench.suites import jasper
from asrkit.workbench.bench.suites.ways import speech
from asrkit.workbench.claims import load_claims

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = presets.mini_jasper()


@pytest.fixture(scope="module")
def small():
    return jasper.random_jasper(SMALL, "cpu")


def test_the_studies_record_the_claims_that_wait_for_a_gpu(monkeypatch):
    """A rehearsal on a CPU, which settles nothing."""
    first, *_, last = SMALL.encoder.stages
    few = replace(SMALL, encoder=replace(SMALL.encoder, stages=(first, last)))
    small = jasper.random_jasper(few, "cpu")
    cases = jasper.claims(small, "cpu", True)
    suite = bench.Suite(name="jasper", cases=lambda device, quick: cases)
    monkeypatch.setitem(bench.SUITES, "jasper", suite)
    records = bench.run("jasper", quick=True)
    claims = {claim.id: claim for claim in load_claims()}
    found = {record["what"]: record for record in records}
    assert {*found} == {*jasper.LATENCY, *jasper.TRAINING}
    for name, record in found.items():
        claim = claims[name]
        assert (record["metric"], record["unit"]) == (claim.metric, claim.unit)
        assert tuple(record["params"].get("arms", ())) == tuple(claim.arms)
        assert claim.needs == "cuda"
        assert "asrkit bench encoders --device cuda" in claim.notes
        assert record["params"]["quick"] and record["params"]["device"] == "cpu"


def test_a_training_step_lowers_the_loss_and_leaves_the_model_as_it_is():
    small = CTCModel(SMALL)
    before = [weight.clone() for weight in small.parameters()]
    step = jasper.training_step(small, 2, 60, mixed=False)
    losses = [step().item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, before, small.parameters()))


@pytest.mark.parametrize("T", [1, 2, 31])
def test_a_model_without_lengths_is_the_model_on_a_whole_utterance(small, T):
    features = torch.randn(1, T, 80)
    wanted, _ = small(features, torch.tensor([T]))
    torch.testing.assert_close(WholeUtterances(small)(features), wanted)


def test_calls_that_are_timed_end_with_the_best_tokens_of_every_way(small, monkeypatch):
    taken = {}

    def measure(calls, **how):
        taken.update({way: call() for way, call in calls.items()}, how=how)
        assert torch.backends.cudnn.benchmark
        return {}

    autotune = torch.backends.cudnn.benchmark
    monkeypatch.setattr(jasper, "measure", measure)
    ways = ("float32", "bfloat16", "optimized_bfloat16")
    jasper.latencies(small, 2, 0.3, ways, repeats=5)
    assert taken.pop("how") == {"repeats": 5, "warmup": 16, "device": "cpu"}
    features, _ = speech(2, 0.3, 80, "cpu")
    with torch.inference_mode():
        log_probs, _ = small(features, torch.tensor([30, 30]))
    assert taken.keys() == {*ways}
    for tokens in taken.values():
        assert tokens.shape == log_probs.shape[:2]
    assert torch.equal(taken["float32"], log_probs.argmax(-1))
    assert torch.backends.cudnn.benchmark == autotune


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
def test_the_peers_that_are_installed_are_the_pinned_ones_and_none_sends_telemetry():
    root = Path(jasper.__file__).parents[4]
    lines = (root / "requirements-peers.txt").read_text(encoding="utf-8").splitlines()
    pins = {tuple(line.split("==")) for line in lines if "==" in line}
    (packages,) = PYTHON.parents[1].glob("lib/python*/site-packages")
    found = {
        one.metadata["Name"]: one.version for one in distributions(path=[str(packages)])
    }
    same = {name.replace("_", "-"): version for name, version in found.items()}
    assert {(name.replace("_", "-"), version) for name, version in pins} <= {
        *same.items()
    }
    # what NeMo imports sends nothing unless somebody gives it an exporter
    senders = {name for name in found if "telemetry" in name}
    assert senders <= {"nv-one-logger-training-telemetry"}
