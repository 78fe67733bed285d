"""The suite of inference engines: the same encoder in ours and theirs, and errors beside times."""

from dataclasses import replace

import pytest
import torch

from asrkit.cpu import has_int8
from asrkit.models import presets
from asrkit.workbench import bench
from asrkit.workbench.bench.peers.peer_engines import WholeUtterances
from asrkit.workbench.bench.peers.processes import NAMES, PYTHON
from asrkit.workbench.bench.suites import encoder as encoders
from asrkit.workbench.bench.suites import engines, ways

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = replace(presets.tiny().encoder, width=24, heads=2, layers=2)
LARGEST = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1}  # errors


def measured(monkeypatch, encoder, B, peers=None):
    """Records of the suite's cases with `encoder`."""
    features = torch.randn(B, 90, 80)

    def cases(device, quick):
        return engines.cases(
            engines.conformer("small", encoder, features), quick, peers
        )

    suite = bench.Suite(name="engines", cases=cases)
    monkeypatch.setitem(bench.SUITES, "engines", suite)
    return bench.run("engines", quick=True, peers=peers)


def errors(records):
    """The recorded error of each (case, arm)."""
    found = [one for one in records if one["metric"] == "relative_error"]
    return {(one["what"], one["impl"]): one["value"] for one in found}


@pytest.fixture(scope="module")
def small():
    return encoders.random_encoder(SMALL, "cpu")


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("B, T", [(1, 1), (1, 9), (2, 130)])
@torch.inference_mode()
def test_an_encoder_without_lengths_is_the_encoder_on_whole_utterances(B, T, scale):
    encoder = encoders.random_encoder(replace(SMALL, scale_input=scale), "cpu")
    features = torch.randn(B, T, 80)
    wanted, _ = encoder(features, torch.full((B,), T))
    whole = WholeUtterances(encoder).eval()
    torch.testing.assert_close(whole(features), wanted, rtol=1e-4, atol=1e-5)


def test_ours_alone_eager_and_optimized_with_errors_and_floors(small, monkeypatch):
    records = measured(monkeypatch, small, B=2)
    found = errors(records)
    wanted = {
        ("engines-float32", "optimized_float32"),
        ("engines-bfloat16", "bfloat16"),
        ("engines-bfloat16", "optimized_bfloat16"),
    }
    if has_int8():
        wanted |= {
            ("engines-int8", "bfloat16"),
            ("engines-int8", "optimized_bfloat16"),
            ("engines-int8", "optimized_int8"),
        }
        int8 = found["engines-int8", "optimized_int8"]
        assert int8 != found["engines-int8", "optimized_bfloat16"]
    assert found.keys() == wanted
    for (what, _), value in found.items():
        assert 0 < value < LARGEST[what.partition("-")[2]]
    for one in records:
        params = one["params"]
        assert (params["cores"], params["preset"]) == (1, "small")
        if one["metric"] == "latency":
            assert params["floor_FLOP"] > 0
            if params["dtype"] == "int8":  # whose rate is not measured
                assert "peak_FLOP" not in params
            else:
                assert params["peak_FLOP"] > 0 and params["least_ms"] > 0
            assert params["audio_s"] == 2 * 90 / 100


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON.exists(), reason="needs OpenVINO and ONNX Runtime: make peers"
)
@pytest.mark.parametrize(
    "B, kinds",
    [
        (1, ["float32"]),  # the others are made of its graph, weight by weight
        (2, ["float32", "bfloat16", "int8"]),
    ],
)
def test_engines_compute_the_same_from_the_same_weights(
    small, monkeypatch, capfd, B, kinds
):
    asked = {f"engines-{kind}": NAMES[f"engines-{kind}"] for kind in kinds}
    with bench.Peers(names=asked) as peers:
        records = measured(monkeypatch, small, B, peers)
        assert not peers.running
    found = errors(records)
    timed = {
        one["impl"]: one["params"] for one in records if one["metric"] == "latency"
    }
    names = {(what, name) for what in asked for name in asked[what]}
    if (
        "engines-bfloat16",
        "openvino_bfloat16",
    ) in names - found.keys():  # which then says so
        assert "it computes in f32 on this CPU, not in bf16" in capfd.readouterr().err
        names.remove(("engines-bfloat16", "openvino_bfloat16"))
    assert len(names) >= 2 * len({*kinds} - {"bfloat16"}) and names <= found.keys()
    for what, name in names:
        kind = what.partition("-")[2]
        assert 0 < found[what, name] < LARGEST[kind]
        assert timed[name]["dtype"] == kind
        assert timed[name]["peer"].split()[0] == name.rpartition("_")[0]
        if kind == "int8":
            assert "peak_FLOP" not in timed[name]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs OpenVINO: make peers")
def test_an_engine_with_other_weights_is_not_measured(small, monkeypatch):
    plain = engines.write_model

    def write_other(folder, model):
        with torch.no_grad():
            other = ways.twin(model.encoder, torch.float64).float()
            other.blocks[-1].final_norm.weight.mul_(1.01)
            model.encoder = other
        plain(folder, model)

    monkeypatch.setattr(engines, "write_model", write_other)
    with (
        bench.Peers(names={"engines-float32": ("openvino_float32",)}) as peers,
        pytest.raises(AssertionError, match="openvino_float32 disagrees with float32"),
    ):
        measured(monkeypatch, small, 1, peers)


def test_a_gpu_is_refused_in_a_line():
    with pytest.raises(
        ValueError, match="^device: expected cpu for the suite engines, got cuda"
    ):
        next(engines.suite("cuda", True))
