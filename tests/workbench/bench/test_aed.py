"""The suite of attention decoders: ways, drafts and peers agree, floors are those of the tensors, layers are moved."""

from types import SimpleNamespace

import pytest
import torch

from asrkit.cli import main
from asrkit.workbench import bench, records
from asrkit.workbench.bench.peers.peer_attention import AED_DECODERS, renamed, split, write
from asrkit.workbench.bench.peers.processes import PYTHON
from asrkit.workbench.bench.planted_attention import planted_decoder, planted_text
from asrkit.workbench.bench.suites import aed, claims, claims_attention

pytestmark = pytest.mark.usefixtures("one_thread")
installed = pytest.mark.skipif(not PYTHON.exists(), reason="needs nemo_toolkit: make peers")
SMALL = {"V": 33, "width": 112, "layers": 2, "heads": 2, "most": 64}


@pytest.fixture(scope="module")
def found():
    return bench.run("aed", quick=True)


@pytest.fixture(scope="module")
def plan():
    return planted_text(planted_decoder(**SMALL), 3, 40, prompt=2)


def test_every_way_is_timed_beside_drafts_and_packed_weights(found):
    timed = {one["impl"] for one in found if one["what"] == "aed-greedy"}
    drafts = {f"draft_{per_cent}" for per_cent in aed.ERRORS}
    assert timed == {*aed.WAYS, *aed.SLOW_WAYS, "kept_packed", "absorbed_packed"} | drafts
    ratios = {(*one["params"]["arms"],) for one in found if one["metric"] == "ratio"}
    assert {("recomputed", "kept"), ("absorbed", "kept"), ("kept", "draft_0")} <= ratios
    assert {("2_2_recomputed", "3_1_recomputed"), ("2_2_kept", "3_1_kept")} <= ratios


def test_calls_of_the_decoder_are_counted_and_a_right_draft_takes_one(found):
    rows = [one for one in found if one["what"] == "aed-greedy" and one["metric"] == "latency"]
    calls = {one["impl"]: one["params"]["follow"] for one in rows if one["params"]["shape"][0] == 3}
    (steps,) = {one["params"]["steps"] for one in rows if one["params"]["shape"][0] == 3}
    assert calls["kept"] == calls["recomputed"] == calls["absorbed_packed"] == steps > 5
    assert calls["draft_0"] == 1 <= calls["draft_20"] <= steps


def test_encoders_alone_are_timed_beside_the_whole_models(found):
    whole = [one for one in found if one["what"] == "aed-whole-2-2" and one["unit"] == "ms"]
    assert {"encoder_2", "encoder_3", "2_2_kept", "3_1_recomputed"} <= {
        one["impl"] for one in whole
    }
    assert all(one["value"] > 0 for one in whole)


def test_least_bytes_are_those_of_the_tensors_that_a_step_reads(plan):
    model = plan.model
    weights = aed.decoder_weights(model, keys_values=True)
    layers = sum(weight.numel() for weight in model.layers.parameters())
    assert weights == layers + model.embedding.weight.numel() + 33 + 2 * 112
    unread = sum(
        weight.numel() for name, weight in model.named_parameters() if ".key_value." in name
    )
    assert aed.decoder_weights(model, keys_values=False) == weights - unread > 0
    one = planted_text(planted_decoder(**SMALL), 1, 20, prompt=2)
    steps, L, D, T = one.steps(), 2, 112, 20
    memory = one.model.remember(one.encoded, one.lengths, cross="kept")
    frames = sum(part.numel() for part in (*memory.keys, *memory.values))
    assert frames == 2 * L * D * T
    past = sum(2 * L * D * place for place in range(2, 2 + steps))
    assert aed.least_bytes(one, {}) == 4 * (steps * (weights - unread + frames) + past)
    absorbed = aed.least_bytes(one, {"cross": "absorbed"})
    assert absorbed == 4 * (steps * (weights + D * T) + past)
    assert aed.least_bytes(one, {"cross": "recomputed", "past": "none"}) == absorbed - 4 * past
    states = aed.least_bytes(one, {"cross": "recomputed", "past": "states"})
    assert states == absorbed - 2 * past
    # an utterance that has ended reads nothing more
    assert aed.least_bytes(plan, {}) < 3 * aed.least_bytes(plan, {}) // 2


def test_an_arm_that_says_something_else_is_not_measured(monkeypatch):
    plain = aed.aed_greedy

    def wrong(*given, **options):
        found = plain(*given, **options)
        if options.get("cross") == "absorbed":
            found.labels.add_(1)
        return found

    monkeypatch.setattr(aed, "aed_greedy", wrong)
    decoder = planted_decoder(**SMALL)
    with pytest.raises(AssertionError, match="other labels than were planted"):
        next(aed.decoding(decoder, 2, 24, aed.WAYS, "cpu", True))


def test_on_a_gpu_packed_weights_have_no_arms(plan):
    arms = aed.arms_of(plan, aed.WAYS, True)
    assert not any(name.endswith("_packed") for name in arms)


def test_weights_of_peers_are_ours_with_queries_keys_and_values_apart(plan):
    weights = split(plan.model.state_dict())
    layer = plan.model.layers[1]
    qkv = [weights[f"layers.1.self_attention.{part}.weight"] for part in ("query", "key", "value")]
    assert torch.equal(torch.cat(qkv), layer.self_attention.qkv.weight)
    both = [weights[f"layers.1.cross_attention.{part}.bias"] for part in ("key", "value")]
    assert torch.equal(torch.cat(both), layer.cross_attention.key_value.bias)
    assert not any(name.startswith("encoder") for name in weights)
    names = {*renamed(weights, dict.fromkeys(_ours(weights), "x"))}
    assert names == {f"layers.{n}.x.{kind}" for n in (0, 1) for kind in ("weight", "bias")}


def _ours(weights):
    layers = [name for name in weights if name.startswith("layers.")]
    return {name.split(".", 2)[2].rpartition(".")[0] for name in layers}


@installed
@pytest.mark.parametrize("peer", AED_DECODERS)
def test_peers_say_the_same_with_the_same_weights(peer, plan, tmp_path):
    write(tmp_path / "plan.pt", plan.model, plan.encoded, plan.lengths, plan.prompt)
    with bench.Peers(names={"aed-greedy": (peer,)}) as peers:
        (arm,) = peers.arms("aed-greedy", plan=str(tmp_path / "plan.pt")).values()
        answer = arm(observe=True)
    labels, lengths, frames = answer.digest
    assert [row[:n] for row, n in zip(labels.tolist(), lengths, strict=True)] == plan.labels
    assert frames.shape == labels.shape and (frames == -1).all()
    assert arm.version.startswith(AED_DECODERS[peer][0]) and answer.cpu_ms > 0


@installed
def test_peers_stand_beside_our_kept_arm_in_the_records(tmp_path):
    out = tmp_path / "out.jsonl"
    assert main(["bench", "aed", "--quick", "--peers", "--out", str(out)]) == 0
    ratios = [one["params"].get("arms") for one in records.read(out)]
    assert ["nemo_aed", "kept"] in ratios and ["transformers_canary", "kept"] in ratios


def test_the_claims_are_recorded_as_published_and_beside_them_with_keys_kept():
    (study,) = claims.suite("cpu", True, only=("attention",))
    assert study.what == "claims: decoder-bottleneck, decoder-3x"
    found = [*study.measure()]
    sizes = len(claims_attention.sizes_of(True).batches)
    assert [one.what for one in found] == sizes * [
        "decoder-bottleneck", "decoder-3x", "decoder-bottleneck-kept", "decoder-3x-kept",
    ]  # fmt: skip
    for one in found:
        if one.metric == "share":
            assert 0 <= one.value < 1 and one.impl in ("recomputed", "kept")
        else:
            assert one.params["arms"] == [*claims_attention.NAMES]


def test_the_published_sizes_are_canarys_and_the_largest_batch_decides():
    sizes = claims_attention.sizes_of(False)
    assert (sizes.deep.layers, sizes.shallow.layers) == (24, 4)
    assert (sizes.deep.encoder.layers, sizes.shallow.encoder.layers) == (24, 32)
    assert sizes.batches == (1, 32, 128) and sizes.seconds == (10.0, 20.0)


def test_a_study_that_hears_something_else_ends(monkeypatch):
    empty = SimpleNamespace(tokens=list)
    monkeypatch.setattr(claims_attention, "aed_greedy", lambda *given, **options: empty)
    with pytest.raises(AssertionError, match="recomputed finds other labels than were planted"):
        [*claims_attention.moved_layers("cpu", True)]
