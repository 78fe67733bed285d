"""The suite of attention decoders: every way agrees, floors are those of the tensors."""

from types import SimpleNamespace

import pytest

from asrkit.workbench import bench
from asrkit.workbench.bench.planted_attention import planted_decoder, planted_text
from asrkit.workbench.bench.suites import aed, claims, claims_attention

pytestmark = pytest.mark.usefixtures("one_thread")
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
    assert (
        timed == {*aed.WAYS, *aed.SLOW_WAYS, "kept_packed", "absorbed_packed"} | drafts
    )
    ratios = {(*one["params"]["arms"],) for one in found if one["metric"] == "ratio"}
    assert {("recomputed", "kept"), ("absorbed", "kept"), ("kept", "draft_0")} <= ratios


def test_calls_of_the_decoder_are_counted_and_a_right_draft_takes_one(found):
    rows = [
        one
        for one in found
        if one["what"] == "aed-greedy" and one["metric"] == "latency"
    ]
    calls = {
        one["impl"]: one["params"]["follow"]
        for one in rows
        if one["params"]["shape"][0] == 3
    }
    (steps,) = {
        one["params"]["steps"] for one in rows if one["params"]["shape"][0] == 3
    }
    assert calls["kept"] == calls["recomputed"] == calls["absorbed_packed"] == steps > 5
    assert calls["draft_0"] == 1 <= calls["draft_20"] <= steps


def test_least_bytes_are_those_of_the_tensors_that_a_step_reads(plan):
    model = plan.model
    weights = aed.decoder_weights(model, keys_values=True)
    layers = sum(weight.numel() for weight in model.layers.parameters())
    assert weights == layers + model.embedding.weight.numel() + 33 + 2 * 112
    unread = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if ".key_value." in name
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
    assert (
        aed.least_bytes(one, {"cross": "recomputed", "past": "none"})
        == absorbed - 4 * past
    )
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
        aed.decoding(decoder, 2, 24, aed.WAYS, "cpu", True)


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


def test_a_study_that_hears_something_else_ends(monkeypatch):
    empty = SimpleNamespace(tokens=list)
    monkeypatch.setattr(claims_attention, "aed_greedy", lambda *given, **options: empty)
    with pytest.raises(
        AssertionError, match="recomputed finds other labels than were planted"
    ):
        [*claims_attention.moved_layers("cpu", True)]
