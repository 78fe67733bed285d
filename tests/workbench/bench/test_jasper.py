"""The suite of Jasper at a small size: arms, floors, engines, and the studies of claims."""

from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from asrkit.models import CTCModel, presets
from asrkit.workbench import bench
from asrkit.workbench.bench import jasper_claims
from asrkit.workbench.bench.peers.peer_engines import WholeUtterances
from asrkit.workbench.bench.peers.processes import NAMES, PYTHON
from asrkit.workbench.bench.suites import engines, jasper, ways
from asrkit.workbench.claims import load_claims
from asrkit.workbench.cost import encoder_flops

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = presets.mini_jasper()
KINDS = ("bfloat16", "float32")
OURS = {name for kind in KINDS for name in NAMES[f"jasper-engines-{kind}"]}


@pytest.fixture(scope="module")
def small():
    return jasper.random_jasper(SMALL, "cpu")


def run(monkeypatch, cases, peers=None):
    """Records of these cases, and of the peers that join them."""
    suite = bench.Suite(name="jasper", cases=lambda device, quick: iter(cases))
    monkeypatch.setitem(bench.SUITES, "jasper", suite)
    return bench.run("jasper", quick=True, peers=peers)


def test_arms_agree_and_have_their_least_work(small, monkeypatch):
    inputs = ways.speech(2, 0.3, 80, "cpu")
    case = jasper.inference_case(
        small, inputs, jasper.ways_of(cuda=False), True, "mini_jasper"
    )
    records = run(monkeypatch, [case])
    timed = {
        one["impl"]: one["params"] for one in records if one["metric"] == "latency"
    }
    kinds = ("float32", "bfloat16")
    assert [*timed] == [name for kind in kinds for name in (kind, f"optimized_{kind}")]
    weights = sum(weight.numel() for weight in small.parameters())
    for name, params in timed.items():
        assert params["floor_FLOP"] == encoder_flops(SMALL.encoder, B=2, T=30)
        assert params["floor_B"] == weights * (2 if name.endswith("bfloat16") else 4)
        assert params["cores"] == 1 and params["quick"]
    pairs = {
        tuple(one["params"]["arms"]) for one in records if one["metric"] == "ratio"
    }
    assert ("float32", "optimized_float32") in pairs and (
        "bfloat16",
        "optimized_bfloat16",
    ) in pairs


def test_the_studies_record_the_claims_that_wait_for_a_gpu(monkeypatch):
    """A rehearsal on a CPU, which settles nothing."""
    first, *_, last = SMALL.encoder.stages
    few = replace(SMALL, encoder=replace(SMALL.encoder, stages=(first, last)))
    small = jasper.random_jasper(few, "cpu")
    records = run(monkeypatch, jasper_claims.cases(small, "cpu", True))
    claims = {claim.id: claim for claim in load_claims()}
    found = {record["what"]: record for record in records}
    assert {*found} == {*jasper_claims.LATENCY, *jasper_claims.TRAINING}
    for name, record in found.items():
        claim = claims[name]
        assert (record["metric"], record["unit"]) == (claim.metric, claim.unit)
        assert tuple(record["params"].get("arms", ())) == tuple(claim.arms)
        assert claim.needs == "cuda"
        assert "asrkit bench jasper --device cuda" in claim.notes
        assert record["params"]["quick"] and record["params"]["device"] == "cpu"


def test_a_training_step_lowers_the_loss_and_leaves_the_model_as_it_is():
    small = CTCModel(SMALL)
    before = [weight.clone() for weight in small.parameters()]
    step = jasper_claims.TrainingStep(small, 2, 60, "tf32")
    losses = [step().item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, before, small.parameters()))


@pytest.mark.parametrize("T", [1, 2, 31])
def test_a_model_without_lengths_is_the_model_on_a_whole_utterance(small, T):
    features = torch.randn(1, T, 80)
    wanted, _ = small(features, torch.tensor([T]))
    torch.testing.assert_close(WholeUtterances(small)(features), wanted)


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON.exists(), reason="needs OpenVINO and ONNX Runtime: make peers"
)
def test_engines_compute_the_same_from_the_same_weights(small, monkeypatch, capfd):
    with bench.Peers() as peers:
        subject = jasper.engine_subject(small, [0.3, 0.41], "mini_jasper")
        records = run(monkeypatch, engines.cases(subject, True, peers, KINDS), peers)
        assert not peers.running
    timed = {}
    for one in records:
        if one["metric"] == "latency":
            timed.setdefault(one["impl"], []).append(one["params"])
    running = set(OURS)
    if "openvino_bfloat16" not in timed:  # which then says so
        assert "it computes in f32 on this CPU, not in bf16" in capfd.readouterr().err
        running.remove("openvino_bfloat16")
    assert running <= {*timed}
    for name in running:
        assert [params["shape"][1] for params in timed[name]] == [30, 41]
        kind = name.rpartition("_")[2]
        for params in timed[name]:
            assert params["dtype"] == kind and params["cores"] == 1
            assert params["tolerance"] == {"float32": 1e-4, "bfloat16": 5e-2}[kind]
            assert params["peer"].split()[0] == name.rpartition("_")[0]
    pairs = {
        tuple(one["params"]["arms"]) for one in records if one["metric"] == "ratio"
    }
    for name in running:
        kind = name.rpartition("_")[2]
        assert {("float32", name), (name, f"optimized_{kind}")} <= pairs


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
    assert not [name for name in found if "telemetry" in name]
