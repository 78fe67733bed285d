"""The suite of encoders at small sizes: records, floors, errors, peers, and arms that are refused."""

import os
from copy import deepcopy
from dataclasses import replace
from itertools import chain, islice, product

import pytest
import torch

from asrkit.cpu import has_int8
from asrkit.models import CTCConfig, CTCModel, presets
from asrkit.transcribe import recognizer
from asrkit.workbench.cost import encoder_flops, encoder_parameters
from asrkit.workbench.lessons.shared import variants
from asrkit.workbench.measure.comparison import check
from benchmarks.harness.cases import Suite
from benchmarks.harness.runner import run as run_suite
from benchmarks.peers.peer_encoders import sketch
from benchmarks.peers.peer_engines import WholeUtterances
from benchmarks.peers.processes import NAMES, PYTHON, Peers
from benchmarks.suites import SUITES, encoders

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = presets.tiny().encoder
SMALL = replace(TINY, width=24, heads=2, layers=2)
LARGEST = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1}  # errors


@pytest.fixture(scope="module")
def small():
    """An encoder with random weights, and a batch of two."""
    return encoders.random_encoder(TINY, "cpu"), variants.random_features(
        2, 1, 80, "cpu"
    )


def run(cases, monkeypatch, **options):
    """Records of these cases."""
    suite = Suite(name="encoders", cases=lambda device, quick: iter(cases))
    monkeypatch.setitem(SUITES, "encoders", suite)
    return run_suite("encoders", quick=True, **options)


def by_impl(records, metric="latency"):
    """Records of a metric by (case, arm)."""
    return {
        (record["what"], record["impl"]): record
        for record in records
        if record["metric"] == metric
    }


def pairs_of(records):
    """The pairs of arms whose ratio was recorded."""
    ratios = [record for record in records if record["metric"] == "ratio"]
    return {tuple(record["params"]["arms"]) for record in ratios}


def test_a_record_has_its_arithmetic_its_least_work_and_the_time_of_that_at_the_ceiling(
    monkeypatch,
):
    found = run(islice(encoders.suite("cpu", True), 4), monkeypatch)
    rates = by_impl(found, "matrix_product")
    timed = by_impl(found)
    kinds = ("float32", "autocast_bfloat16", "bfloat16")
    wanted = {*kinds, "optimized_float32", "optimized_bfloat16"}
    assert {name for _, name in timed} == wanted
    for (_, name), record in timed.items():
        params = record["params"]
        dtype = "float32" if name.endswith("float32") else "bfloat16"
        assert params["dtype"] == dtype
        assert params["preset"] == "tiny"
        assert params["weights"] == "random"
        assert params["audio_s"] == 3.0
        assert params["floor_FLOP"] == encoder_flops(TINY, B=2, T=200)
        halved = name in ("bfloat16", "optimized_bfloat16")
        assert params["floor_B"] == encoder_parameters(TINY) * (2 if halved else 4)
        rate = max(rates["machine-ceiling", dtype]["samples"])
        by_products = params["floor_FLOP"] / rate
        by_bytes = params["floor_B"] / params["peak_B"]
        assert params["least_ms"] == pytest.approx(1e3 * max(by_products, by_bytes))


def test_an_arm_outside_its_tolerance_has_no_record(small, monkeypatch):
    monkeypatch.setitem(variants.TOLERANCE, "bfloat16", 1e-6)
    case = encoders.case("encoder-bfloat16", "float32 bfloat16", *small, True)
    with pytest.raises(AssertionError, match="bfloat16 disagrees with float32"):
        run([case], monkeypatch)


def watched(monkeypatch, owner, name):
    """(cores, threads) of each call of a function from now on."""
    where = []
    plain = getattr(owner, name)

    def watching(*arguments, **options):
        where.append((len(os.sched_getaffinity(0)), torch.get_num_threads()))
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, watching)
    return where


GPU_VARIANTS = sorted({*" ".join(encoders.VARIANTS["cuda"].values()).split()})


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_VARIANTS)
def test_on_a_gpu_every_variant_agrees_with_float64_on_a_cpu(name):
    model = encoders.random_encoder(TINY, "cpu")
    features, lengths = variants.random_features(3, 2, 80, "cpu")
    moved = deepcopy(model).to("cuda", variants.weights_dtype(name))
    buffer = features.cuda()
    call = variants.arm(moved, (buffer, lengths.cuda()), name)
    for sign in (1, -1):  # a graph has to read its inputs anew
        buffer.copy_(sign * features)
        with torch.inference_mode():
            wanted, ends = model.double()(sign * features.double(), lengths)
        encoded, encoded_lengths = call()
        assert torch.equal(encoded_lengths.cpu(), ends)
        off = (encoded.cpu().double() - wanted).norm() / wanted.norm()
        assert off <= variants.TOLERANCE[variants.arithmetic(name)]


def test_a_sketch_depends_on_every_frame_and_not_on_padding():
    frames = torch.randn(2, 5, 32)
    lengths = torch.tensor([5, 3])
    seen = sketch(frames, lengths)
    assert seen.shape == (2, 5, 9)
    for b, t in [(0, 4), (1, 2), (1, 3)]:
        other = frames.clone()
        other[b, t, 7] += 1
        assert torch.equal(sketch(other, lengths), seen) == (t >= lengths[b])


@pytest.mark.live
@pytest.mark.skipif(
    not PYTHON.exists(), reason="needs NeMo and transformers: make peers"
)
def test_peers_encode_the_same_with_the_same_weights(small, monkeypatch):
    encoder, inputs = small
    with Peers() as peers:
        cases = encoders.fastconformer(encoder, inputs, True, peers)
        found = run(cases, monkeypatch, peers=peers)
        assert not peers.running
    names = {"nemo_encoder", "transformers_encoder"}
    timed = by_impl(found)
    for what in encoders.VARIANTS["cpu"]:
        ours = what.removeprefix("encoder-").replace("-", "_")
        for name in names:
            assert timed[what, name]["params"]["dtype"] == variants.arithmetic(ours)
            assert (name, ours) in pairs_of(found)


def test_the_whole_recogniser_finds_planted_labels_with_one_thread_on_one_core(
    monkeypatch,
):
    where = watched(monkeypatch, recognizer, "log_mel")
    cores = os.sched_getaffinity(0)
    torch.set_num_threads(2)
    case = encoders.one_core(True)
    check(case)
    assert {"float32", "bfloat16", "optimized_bfloat16"} <= {*case.arms}
    assert ("optimized_int8" in case.arms) == has_int8()
    assert where == [(1, 1)] * len(case.arms)
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == 2
    frames, labels = case.once("float32")()
    assert labels.shape[1] == case.params["labels"] > 0
    assert frames.shape[1] == case.params["shape"][1]
    assert case.params["threads"] == case.params["cores"] == 1


def engine_cases(encoder, B, peers=None):
    """The cases of engines with `encoder`."""
    exported = CTCModel(CTCConfig(encoder=encoder.config, vocab_size=1)).eval()
    exported.encoder = encoder
    batches = [torch.randn(B, 90, 80)]
    return encoders.engines(
        "engines", encoder, exported, batches, True, peers, preset="small"
    )


@pytest.fixture(scope="module")
def narrow():
    return encoders.random_encoder(SMALL, "cpu")


@pytest.mark.parametrize("scale", [False, True])
@torch.inference_mode()
def test_an_encoder_without_lengths_is_the_encoder_on_whole_utterances(scale):
    encoder = encoders.random_encoder(replace(SMALL, scale_input=scale), "cpu")
    whole = WholeUtterances(encoder).eval()
    for B, T in [(1, 1), (1, 9), (2, 130)]:
        features = torch.randn(B, T, 80)
        wanted, _ = encoder(features, torch.full((B,), T))
        torch.testing.assert_close(whole(features), wanted, rtol=1e-4, atol=1e-5)


def test_ours_alone_on_one_core_with_errors_and_floors(narrow, monkeypatch):
    records = run(engine_cases(narrow, B=2), monkeypatch)
    found = by_impl(records, "relative_error")
    wanted = {"float32": ["optimized_float32"]}
    wanted["bfloat16"] = ["bfloat16", "optimized_bfloat16"]
    if has_int8():
        wanted["int8"] = [*wanted["bfloat16"], "optimized_int8"]
    pairs = {(f"engines-{kind}", name) for kind in wanted for name in wanted[kind]}
    assert found.keys() == pairs
    for (what, _), record in found.items():
        assert 0 < record["value"] < LARGEST[what.partition("-")[2]]
    for record in by_impl(records).values():
        params = record["params"]
        assert params["cores"] == 1
        assert params["preset"] == "small"
        assert params["audio_s"] == 2 * 90 / 100
        assert params["floor_FLOP"] > 0
        # the rate of int8 is not measured
        assert ("peak_FLOP" in params) == (params["dtype"] != "int8")


@pytest.mark.live
@pytest.mark.skipif(
    not PYTHON.exists(), reason="needs OpenVINO and ONNX Runtime: make peers"
)
def test_engines_compute_the_same_from_the_same_weights(narrow, monkeypatch, capfd):
    kinds = ["float32", "bfloat16", *["int8"] * has_int8()]
    names_by_kind = {f"engines-{kind}": NAMES[f"engines-{kind}"] for kind in kinds}
    with Peers(names=names_by_kind) as peers:
        records = run(engine_cases(narrow, 2, peers), monkeypatch, peers=peers)
        assert not peers.running
    errors = by_impl(records, "relative_error")
    timed = by_impl(records)
    if ("engines-bfloat16", "openvino_bfloat16") not in errors:
        assert "it computes in f32 on this CPU, not in bf16" in capfd.readouterr().err
        del names_by_kind["engines-bfloat16"]
    for what, name in chain(
        *(product([what], names_by_kind[what]) for what in names_by_kind)
    ):
        kind = what.partition("-")[2]
        params = timed[what, name]["params"]
        assert 0 < errors[what, name]["value"] < LARGEST[kind]
        assert params["dtype"] == kind
        assert params["cores"] == 1
        assert params["peer"].split()[0] == name.rpartition("_")[0]
        assert (name, f"optimized_{kind}") in pairs_of(records)
