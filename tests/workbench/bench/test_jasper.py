"""The suite of Jasper at a small size: arms, floors, both statistics, and the studies of claims."""

import sys
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from asrkit.models import CTCModel, JasperConfig, presets
from asrkit.workbench import bench
from asrkit.workbench.bench import jasper_claims
from asrkit.workbench.bench.peers.peer_engines import ENGINES, WholeUtterances, write_model
from asrkit.workbench.bench.peers.processes import NAMES, PYTHON
from asrkit.workbench.bench.suites import jasper
from asrkit.workbench.cost import encoder_flops
from asrkit.workbench.ledger import load_claims

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = jasper.config_of(quick=True)
OURS = {*NAMES["jasper-float32"], *NAMES["jasper-bfloat16"]}  # engines that run a Jasper


@pytest.fixture(scope="module")
def small():
    return jasper.random_jasper(SMALL, "cpu")


def run(monkeypatch, *cases):
    """Records of these cases."""
    return run_with(monkeypatch, iter(cases))


def run_with(monkeypatch, cases, peers=None):
    """Records of these cases, and of the peers that join them."""
    suite = bench.Suite(name="jasper", cases=lambda device, quick: cases)
    monkeypatch.setitem(bench.SUITES, "jasper", suite)
    return bench.run("jasper", quick=True, peers=peers)


def test_the_suite_has_the_published_model_at_the_sizes_of_its_bars():
    assert jasper.config_of(quick=False) == presets.jasper_10x5dr()
    assert jasper.CPU_SIZES == ((1, 2.0), (1, 7.0), (2, 7.0), (1, 16.7))
    config = SMALL.encoder
    assert isinstance(config, JasperConfig)
    assert len(config.stages) == 13 and sum(map(len, config.branch_channels())) == 55


def test_the_norms_of_a_random_jasper_have_seen_noise(small):
    norms = [part for part in small.modules() if isinstance(part, torch.nn.BatchNorm1d)]
    assert all(norm.momentum == 0.1 and not norm.training for norm in norms)
    assert all(norm.running_var.std() > 0 for norm in norms)
    again = jasper.random_jasper(SMALL, "cpu")
    features, lengths = jasper.speech(2, 0.3, 64, "cpu")
    assert torch.equal(again(features, lengths)[0], small(features, lengths)[0])


def test_arms_agree_and_have_their_least_work(small, monkeypatch):
    inputs = jasper.speech(2, 0.3, 64, "cpu")
    case = jasper.inference_case(small, inputs, jasper.ways(cuda=False), "cpu", True)
    records = run(monkeypatch, case)
    timed = {one["impl"]: one["params"] for one in records if one["metric"] == "latency"}
    kinds = ("float32", "bfloat16")
    assert [*timed] == [name for kind in kinds for name in (kind, f"optimized_{kind}")]
    weights = sum(weight.numel() for weight in small.parameters())
    for name, params in timed.items():
        assert params["floor_FLOP"] == encoder_flops(SMALL.encoder, B=2, T=30)
        assert params["floor_B"] == weights * (2 if name.endswith("bfloat16") else 4)
        assert params["cores"] == 1 and params["quick"]
    pairs = {tuple(one["params"]["arms"]) for one in records if one["metric"] == "ratio"}
    assert ("float32", "optimized_float32") in pairs and ("bfloat16", "optimized_bfloat16") in pairs


def test_an_arm_that_computes_something_else_leaves_no_record(small, monkeypatch):
    inputs = jasper.speech(1, 0.3, 64, "cpu")
    ways = {"float32": jasper.Way(), "other": jasper.Way()}
    case = jasper.inference_case(small, inputs, ways, "cpu", True)
    right = case.arms["other"]
    wrong = replace(case, arms={**case.arms, "other": lambda: (right()[0] * 1.01, right()[1])})
    with pytest.raises(AssertionError, match="other disagrees with float32"):
        run(monkeypatch, wrong)


def test_arms_of_a_gpu_are_written_down_without_one():
    found = jasper.ways(cuda=True, compiled=True)
    forms = ("", "optimized_", "graphed_", "optimized_graphed_", "compiled_")
    kinds = ("float32", "bfloat16", "float16")
    assert {*found} == {"tf32", *(f"{form}{kind}" for form in forms for kind in kinds)}
    assert next(iter(found)) == "float32"
    assert not any(way.graphed for way in jasper.ways(cuda=False).values())


def test_the_published_protocol_has_both_statistics_and_a_table_says_which_is_which(
    small, monkeypatch
):
    monkeypatch.setitem(jasper.GRID_BATCHES, "cpu", (1,))
    cases = list(jasper.published_cases(small, "cpu", True))
    assert len(cases) == 4
    records = run(monkeypatch, cases[0])
    ours, theirs = records
    assert ours["metric"] == "latency" and ours["params"]["statistic"].endswith("(ours)")
    assert theirs["params"]["statistic"].endswith("(published)")
    assert ours["value"] == ours["stats"]["p50"] and ours["stats"]["n"] == 20
    assert theirs["value"] == pytest.approx(sum(ours["samples"]) / 20, rel=1e-3)
    assert theirs["params"]["p99"] == pytest.approx(max(ours["samples"]), rel=1e-3)
    heading, line, note = jasper.grid_table(records)
    assert heading.split() == (
        "batch seconds precision form | p90 p95 p99 mean | p25 median p75 | TFLOP/s".split()
    )
    assert line.split()[:4] == ["1", "0.5", "float32", "eager"]
    assert "published" in note and "ours" in note
    assert jasper.grid_table(records[:1]) == []


def test_the_studies_record_the_claims_that_wait_for_a_gpu(monkeypatch):
    """A rehearsal on a CPU, which settles nothing."""
    first, *_, last = SMALL.encoder.stages
    few = replace(SMALL, encoder=replace(SMALL.encoder, stages=(first, last)))
    small = jasper.random_jasper(few, "cpu")
    records = run(monkeypatch, *jasper_claims.cases(small, "cpu", True))
    claims = {claim.id: claim for claim in load_claims()}
    found = {record["what"]: record for record in records}
    assert {*found} == {*jasper_claims.LATENCY, *jasper_claims.TRAINING}
    for name, record in found.items():
        claim = claims[name]
        assert (record["metric"], record["unit"]) == (claim.metric, claim.unit)
        assert tuple(record["params"].get("arms", ())) == tuple(claim.arms)
        assert (claim.needs, claim.status) == ("cuda", "planned")
        assert "asrkit bench jasper --device cuda" in claim.notes
        assert record["params"]["quick"] and record["params"]["device"] == "cpu"
    assert found["jasper-throughput-a100"]["params"]["epochs"] == 2


def test_a_training_step_lowers_the_loss_and_leaves_the_model_as_it_is():
    small = CTCModel(SMALL)
    before = [weight.clone() for weight in small.parameters()]
    step = jasper_claims.TrainingStep(small, 2, 60, "tf32")
    losses = [step().item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, before, small.parameters()))


@pytest.mark.parametrize("T", [1, 2, 31])
def test_a_model_without_lengths_is_the_model_on_a_whole_utterance(small, T):
    features = torch.randn(1, T, 64)
    wanted, _ = small(features, torch.tensor([T]))
    torch.testing.assert_close(WholeUtterances(small)(features), wanted)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs OpenVINO and ONNX Runtime: make peers")
def test_engines_compute_the_same_from_the_same_weights(small, monkeypatch, capfd):
    with bench.Peers() as peers:
        cases = jasper.engine_cases(small, [0.3, 0.41], peers, True)
        records = run_with(monkeypatch, cases, peers)
        assert not peers.running
    timed = {}
    for one in records:
        if one["metric"] == "latency":
            timed.setdefault(one["impl"], []).append(one["params"])
    engines = set(OURS)
    if "openvino_bfloat16" not in timed:  # which then says so
        assert "it computes in f32 on this CPU, not in bf16" in capfd.readouterr().err
        engines.remove("openvino_bfloat16")
    assert engines <= {*timed}
    for name in engines:
        assert [params["shape"][1] for params in timed[name]] == [30, 41]
        kind = name.rpartition("_")[2]
        for params in timed[name]:
            assert params["dtype"] == kind and params["cores"] == 1
            assert params["tolerance"] == {"float32": 1e-4, "bfloat16": 5e-2}[kind]
            assert params["peer"].split()[0] == name.rpartition("_")[0]
    pairs = {tuple(one["params"]["arms"]) for one in records if one["metric"] == "ratio"}
    for name in engines:
        kind = name.rpartition("_")[2]
        assert {("float32", name), (name, f"optimized_{kind}")} <= pairs


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs OpenVINO: make peers")
def test_an_engine_with_other_weights_is_not_measured(small, monkeypatch):
    other = jasper.random_jasper(SMALL, "cpu")
    other.output.weight.mul_(1.01)
    monkeypatch.setattr(jasper, "write_model", lambda folder, _: write_model(folder, other))
    names = {"jasper-float32": ("openvino_float32",)}
    with bench.Peers(names=names) as peers:
        cases = jasper.engine_cases(small, [0.3], peers, True)
        with pytest.raises(AssertionError, match="openvino_float32 disagrees with float32"):
            run_with(monkeypatch, cases, peers)


def test_engines_that_are_not_installed_are_a_line_each_and_no_case(small, capfd):
    with bench.Peers(sys.executable) as absent:
        assert list(jasper.engine_cases(small, [0.1], absent, True)) == []
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(OURS)
    for name in OURS:
        package, _ = ENGINES[name]
        (line,) = [one for one in lines if one.startswith(f"peer {name}: ")]
        assert f"No module named '{package}'" in line and "left out. `make peers`" in line


def test_a_suite_without_peers_exports_nothing(monkeypatch):
    monkeypatch.setattr(jasper, "write_model", None)
    whats = [case.what for case in jasper.suite("cpu", True, peers=None)]
    assert "jasper-inference" in whats and not any("engines" in what for what in whats)


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
def test_the_peers_that_are_installed_are_the_pinned_ones_and_none_sends_telemetry():
    root = Path(jasper.__file__).parents[4]
    lines = (root / "requirements-peers.txt").read_text(encoding="utf-8").splitlines()
    pins = {tuple(line.split("==")) for line in lines if "==" in line}
    (packages,) = PYTHON.parents[1].glob("lib/python*/site-packages")
    found = {one.metadata["Name"]: one.version for one in distributions(path=[str(packages)])}
    same = {name.replace("_", "-"): version for name, version in found.items()}
    assert {(name.replace("_", "-"), version) for name, version in pins} <= {*same.items()}
    assert not [name for name in found if "telemetry" in name]
