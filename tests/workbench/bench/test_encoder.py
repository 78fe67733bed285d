"""The suite of encoders on its smallest preset: records, floors, peers, and arms that are refused."""

import os
from copy import deepcopy
from itertools import islice

import pytest
import torch
from torch.nn import functional as F

from asrkit.cpu import has_int8
from asrkit.models import presets
from asrkit.models.packed import multiplies
from asrkit.transcribe import pipeline
from asrkit.workbench import bench
from asrkit.workbench.bench.peers.peer_encoders import sketch
from asrkit.workbench.bench.peers.processes import PYTHON
from asrkit.workbench.bench.suites import encoder, ways
from asrkit.workbench.bench.suites.ways import Way
from asrkit.workbench.cost import encoder_flops, encoder_parameters

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = presets.tiny().encoder


@pytest.fixture(scope="module")
def small():
    """An encoder with random weights, and a batch of two."""
    return encoder.random_encoder(TINY, "cpu"), ways.speech(2, 1, 80, "cpu")


def run(cases, monkeypatch, **how):
    """Records of these cases."""
    suite = bench.Suite(name="encoder", cases=lambda device, quick: iter(cases))
    monkeypatch.setitem(bench.SUITES, "encoder", suite)
    return bench.run("encoder", quick=True, **how)


def test_a_record_has_its_arithmetic_its_least_work_and_the_time_of_that_at_the_ceiling(
    monkeypatch,
):
    found = run(islice(encoder.suite("cpu", True), 4), monkeypatch)
    rates = {
        one["impl"]: max(one["samples"])
        for one in found
        if one["metric"] == "matrix_product"
    }
    timed = {
        (one["what"], one["impl"]): one for one in found if one["metric"] == "latency"
    }
    kinds = ("float32", "autocast_bfloat16", "bfloat16")
    wanted = {*kinds, "packed_float32", "optimized_float32", "optimized_bfloat16"}
    if multiplies(torch.bfloat16):
        wanted.add("packed_bfloat16")
    assert {name for _, name in timed} == wanted
    assert {what for what, _ in timed} == {
        "encoder-" + kind.replace("_", "-") for kind in kinds
    }
    for (what, name), one in timed.items():
        params = one["params"]
        assert params["dtype"] == (
            "float32" if name.endswith("float32") else "bfloat16"
        )
        assert (
            params["preset"] == "tiny"
            and params["weights"] == "random"
            and params["audio_s"] == 3.0
        )
        assert params["floor_FLOP"] == encoder_flops(TINY, B=2, T=200)
        halved = name in ("bfloat16", "packed_bfloat16", "optimized_bfloat16")
        assert params["floor_B"] == encoder_parameters(TINY) * (2 if halved else 4)
        by_products = 1e3 * params["floor_FLOP"] / rates[params["dtype"]]
        assert params["least_ms"] == pytest.approx(
            max(by_products, 1e3 * params["floor_B"] / params["peak_B"])
        )
        speed = next(
            r
            for r in found
            if (r["what"], r["impl"], r["metric"]) == (what, name, "rtfx")
        )
        assert (
            speed["value"] == pytest.approx(3e3 / one["value"])
            and speed["unit"] == "s/s"
        )
    line = next(
        line for line in bench.table(found) if line.startswith("encoder-float32")
    )
    assert "GFLOP/s (" in line and "%)" in line


def test_an_arm_further_from_float32_than_is_told_leaves_no_record(small, monkeypatch):
    monkeypatch.setitem(ways.TOLERANCE, "bfloat16", 1e-6)
    made = encoder.case(
        "encoder-bfloat16",
        encoder.groups(False, False)["encoder-bfloat16"],
        *small,
        True,
    )
    with pytest.raises(AssertionError, match="bfloat16 disagrees with float32"):
        run([made], monkeypatch)


def test_an_arm_without_cudnns_attention_forbids_it_for_itself_only(small, monkeypatch):
    seen, attend = [], F.scaled_dot_product_attention

    def watched(*given, **how):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*given, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    ways = {
        name: encoder.groups(True, False)["encoder-bfloat16"][name]
        for name in ("bfloat16", "without_cudnn_bfloat16")
    }
    made = encoder.case("encoder-bfloat16", {"float32": Way(), **ways}, *small, True)
    layers = len(small[0].blocks)
    bench.check(made)
    assert seen == [True] * layers + [True] * layers + [False] * layers
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert ("bfloat16", "without_cudnn_bfloat16") in made.ratios
    assert next(iter(encoder.groups(True, False))) == "encoder-bfloat16", (
        "worth most on a GPU"
    )


WAYS_OF_A_GPU = {
    name: way
    for ways in encoder.groups(True, compiled=True).values()
    for name, way in ways.items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS_OF_A_GPU)
def test_on_a_gpu_every_way_encodes_what_float64_does_on_a_cpu(name):
    way = WAYS_OF_A_GPU[name]
    model = encoder.random_encoder(TINY, "cpu")
    features, lengths = ways.speech(3, 2, 80, "cpu")
    moved = ways.twin(deepcopy(model).cuda(), way.weights)
    buffer = features.cuda()
    call = ways.arm(moved, (buffer, lengths.cuda()), way)
    for sign in (1, -1):  # a graph has to read its inputs anew
        buffer.copy_(sign * features)
        with torch.inference_mode():
            wanted, ends = model.double()(sign * features.double(), lengths)
        encoded, encoded_lengths = call()
        assert torch.equal(encoded_lengths.cpu(), ends)
        off = (encoded.cpu().double() - wanted).norm() / wanted.norm()
        assert off <= ways.TOLERANCE[way.arithmetic]


def test_a_sketch_sees_every_frame_and_nothing_in_the_padding():
    frames, lengths = torch.randn(2, 5, 32), torch.tensor([5, 3])
    seen = sketch(frames, lengths)
    assert seen.shape == (2, 5, 9)
    for b, t in [(0, 4), (1, 2), (1, 3)]:
        other = frames.clone()
        other[b, t, 7] += 1
        assert torch.equal(sketch(other, lengths), seen) == (t >= lengths[b])


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON.exists(), reason="needs NeMo and transformers: make peers"
)
def test_peers_encode_the_same_with_the_same_weights(monkeypatch):
    with bench.Peers() as peers:
        found = run(islice(encoder.suite("cpu", True), 4), monkeypatch, peers=peers)
    peers = {"nemo_encoder", "transformers_encoder", "transformers_encoder_eager"}
    for kind in ("float32", "autocast-bfloat16", "bfloat16"):
        timed = {
            one["impl"]: one["params"]
            for one in found
            if one["metric"] == "latency" and one["what"] == f"encoder-{kind}"
        }
        assert peers < {*timed} and {timed[name]["dtype"] for name in peers} == {
            kind.rpartition("-")[2]
        }
        pairs = {
            tuple(r["params"]["arms"])
            for r in found
            if r["metric"] == "ratio" and r["what"] == f"encoder-{kind}"
        }
        assert {(name, kind.replace("-", "_")) for name in peers} <= pairs


def test_one_core_says_what_was_planted_with_one_thread_on_one_core(monkeypatch):
    where, plain, cores = [], pipeline.log_mel, os.sched_getaffinity(0)

    def watched(*given, **how):
        where.append((len(os.sched_getaffinity(0)), torch.get_num_threads()))
        return plain(*given, **how)

    monkeypatch.setattr(pipeline, "log_mel", watched)
    torch.set_num_threads(2)
    case = encoder.one_core(True)
    bench.check(case)
    assert {"float32", "bfloat16", "optimized_bfloat16"} <= {*case.arms}
    assert ("optimized_int8" in case.arms) == has_int8()
    assert where == [(1, 1)] * len(case.arms)
    assert os.sched_getaffinity(0) == cores and torch.get_num_threads() == 2
    frames, labels = case.run("float32")
    assert (
        labels.shape[1] == case.params["labels"] > 0
        and frames.shape[1] == case.params["shape"][1]
    )
    assert case.params["threads"] == case.params["cores"] == 1
