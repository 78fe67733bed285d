"""How cases of decoding are made: what is counted of an arm, and the least work of attention."""

from functools import partial

import pytest
import torch

from asrkit.workbench import bench
from asrkit.workbench.bench.attention_ways import WAYS
from asrkit.workbench.bench.planted import planted, planted_decoder, planted_text
from asrkit.workbench.bench.suites import decoders

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"V": 33, "width": 112, "layers": 2, "heads": 2, "most": 64}


@pytest.fixture
def plan():
    return planted(2, 30, V=33, width=240)


@pytest.fixture(scope="module")
def text():
    return planted_text(planted_decoder(**SMALL), 3, 40)


def test_an_arm_that_cannot_run_is_named_and_without_the_first_there_are_none(
    plan, capsys
):
    case = decoders.transducer(plan, "cpu", decoders.LOOPS)
    assert [*case.arms] == [*decoders.LOOPS]
    ways = {"plain": {"graphs": "off"}, "graph": {"graphs": "full"}}
    counted = (plan.model, partial(decoders._decode_transducer, plan))
    arms, params = decoders._counted(*counted, ways, "cpu")
    assert [*arms] == [*params] == ["plain"]
    assert "graph is left out: graphs: expected" in capsys.readouterr().err
    arms, _ = decoders._counted(*counted, {"graph": ways["graph"]} | ways, "cpu")
    assert not arms


@pytest.mark.parametrize("mode", ["step", "full"])
def test_counts_of_a_graph_are_of_its_replay_not_of_its_capture(plan, mode):
    models = []

    def captures_once(model, **options):
        for _ in range(1 if models else 50):
            plan.encoded + 1
        models.append(model)

    ways = {"graph": {"graphs": mode}}
    _, params = decoders._counted(plan.model, captures_once, ways, "cpu")
    # no joint: a replay has no calls to see
    assert params == {"graph": {"launches": 1, "syncs": 0}}
    assert all(model is plan.model for model in models)  # whose graph was captured


def test_on_a_gpu_graphs_have_an_arm_each_and_cases_come_in_the_order_of_their_worth(
    monkeypatch,
):
    asked = {}

    def counted(model, decode, ways, device):
        asked.update(
            {name: way["graphs"] for name, way in ways.items() if "graphs" in way}
        )
        return dict.fromkeys(ways, tuple), {name: {} for name in ways}

    def made(B, T, **sizes):
        return planted(B, T, **sizes | {"V": 33, "width": 240})

    def attention(decoder, B, T, device, quick):
        return bench.Case(what="aed-greedy")

    monkeypatch.setattr(decoders, "planted", made)
    monkeypatch.setattr(decoders.Planted, "to", lambda plan, device, dtype: plan)
    monkeypatch.setattr(decoders, "_counted", counted)
    monkeypatch.setattr(decoders, "write", lambda *given: None)
    monkeypatch.setattr(decoders, "ctc", lambda plan, device: bench.Case(what="ctc"))
    monkeypatch.setattr(decoders, "planted_decoder", lambda layers: layers)
    monkeypatch.setattr(decoders, "attention", attention)
    cases = [*decoders.suite("cuda", False)]
    modes = {f"windowed_looping_{mode}": mode for mode in ("step", "full")}
    assert {name: mode for name, mode in asked.items() if mode != "off"} == modes
    assert {(name, "windowed_looping") for name in modes} <= {*cases[0].ratios}
    assert [*cases[0].peers.against.values()] == ["windowed_looping_full"]
    assert cases[0].peers.request["kind"] == "rnnt-greedy-cuda"
    first = [(32, 187), (1, 187), (128, 62), (8, 187)]
    shapes = [(*case.params["shape"][:2],) for case in cases[:8]]
    assert shapes == [size for size in first for _ in ("rnnt", "tdt")]
    assert ["one_by_one" in case.arms for case in cases[20:22]] == [True, True]
    assert [case.what for case in cases[22:]] == ["ctc"] * 4 + ["aed-greedy"] * 9


def test_calls_of_the_decoder_are_counted_and_a_right_draft_takes_one(text):
    decoder = planted_decoder(**SMALL)
    case = decoders.attention(decoder, 3, 40, "cpu", True)
    calls = {name: params["follow"] for name, params in case.arm_params.items()}
    drafts = {f"draft_{per_cent}" for per_cent in decoders.ERRORS}
    ways = {*decoders.KEPT, "kept_packed"}
    assert {*case.arms} == {*calls} == ways | drafts
    steps = case.params["steps"]
    assert calls["kept"] == calls["recomputed"] == calls["absorbed"] == steps > 5
    assert calls["draft_0"] == 1 <= calls["draft_20"] <= steps
    assert case.arms["kept"]().tokens() == text.labels
    pairs = {("recomputed", "kept"), ("kept", "draft_0"), ("kept", "kept_packed")}
    assert pairs <= {*case.ratios}
    bench.check(case)


def test_least_bytes_are_those_of_the_tensors_that_a_step_reads(text):
    model = text.model
    weights = decoders.decoder_weights(model, keys_values=True)
    layers = sum(weight.numel() for weight in model.layers.parameters())
    assert weights == layers + model.embedding.weight.numel() + 33 + 2 * 112
    unread = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if ".key_value." in name
    )
    assert decoders.decoder_weights(model, keys_values=False) == weights - unread > 0
    one = planted_text(planted_decoder(**SMALL), 1, 20)
    steps, L, D, T = 1 + len(one.labels[0]), 2, 112, 20
    memory = one.model.remember(one.encoded, one.lengths)
    frames = sum(part.numel() for part in (*memory.keys, *memory.values))
    assert frames == 2 * L * D * T
    past = sum(2 * L * D * place for place in range(1, 1 + steps))
    kept = 4 * (steps * (weights - unread + frames) + past)
    assert decoders.least_bytes(one, WAYS["K/V kept"]) == kept
    absorbed = decoders.least_bytes(one, WAYS["absorbed"])
    assert absorbed == 4 * (steps * (weights + D * T) + past)
    states = decoders.least_bytes(one, WAYS["NeMo 3.0"])
    assert states == absorbed - 2 * past
    # an utterance that has ended reads nothing more
    assert len({len(row) for row in text.labels}) > 1
    longest = max(text.labels, key=len)
    full = decoders.Planted(
        **{**vars(text), "labels": [longest] * 3, "frames": text.frames}
    )
    way = WAYS["K/V kept"]
    assert decoders.least_bytes(text, way) < decoders.least_bytes(full, way)


def test_bfloat16_has_a_tolerance_of_its_own(plan):
    exact = decoders.transducer(plan, "cpu", ("frame_looping",))
    half = decoders.transducer(
        plan.to("cpu", torch.bfloat16), "cpu", ("frame_looping",)
    )
    assert (exact.tolerance, half.tolerance) == (1e-3, 0.2)
    assert [one.params["dtype"] for one in (exact, half)] == ["float32", "bfloat16"]
