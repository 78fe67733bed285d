"""Jasper at a small size: latencies, training steps, and their claims."""

from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from asrkit.models import CTCModel, presets
from asrkit.workbench.claims import load_claims
from asrkit.workbench.lessons.shared.jasper import random_jasper
from benchmarks.peers.peer_engines import WholeUtterances
from benchmarks.peers.processes import PYTHON
from benchmarks.suites import jasper

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
    found = {record["what"]: record for record in measured}
    assert {*found} == {*jasper.LATENCY, *jasper.TRAINING}
    claims = {claim.id: claim for claim in load_claims()}
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
