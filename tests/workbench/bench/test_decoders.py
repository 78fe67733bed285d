"""How cases of decoding are made: what is counted of an arm, and the least work of attention."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from asrkit.workbench import bench
from asrkit.workbench.bench.cache_policies import POLICIES
from asrkit.workbench.bench.planted import planted, planted_decoder, planted_text
from asrkit.workbench.bench.suites import decoders

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"V": 33, "width": 112, "layers": 2, "heads": 2, "most": 64}


@pytest.fixture
def plan():
    return planted(2, 30, V=33, width=240)


@pytest.fixture(scope="module")
def decoder():
    return planted_decoder(**SMALL)


@pytest.fixture(scope="module")
def text(decoder):
    return planted_text(decoder, 3, 40)


def test_an_arm_that_cannot_run_is_named_and_without_the_first_there_are_none(
    plan, capsys
):
    ways = {"plain": {"graphs": "off"}, "graph": {"graphs": "full"}}
    counted = (plan.model, partial(decoders._decode_transducer, plan))
    arms, params = decoders._counted(*counted, ways, "cpu")
    assert [*arms] == [*params] == ["plain"]
    assert "graph is left out: graphs: expected" in capsys.readouterr().err
    arms, _ = decoders._counted(*counted, dict(reversed(ways.items())), "cpu")
    assert not arms


def test_calls_of_the_decoder_are_counted_and_a_right_draft_takes_one(decoder, text):
    case = decoders.attention(decoder, 3, 40, "cpu", True)
    calls = {name: params["follow"] for name, params in case.arm_params.items()}
    drafts = {f"draft_{per_cent}" for per_cent in decoders.ERRORS}
    assert {*case.arms} == {*calls} == {*decoders.KEPT, "kept_packed"} | drafts
    steps = case.params["steps"]
    assert calls["kept"] == calls["recomputed"] == calls["absorbed"] == steps > 5
    assert calls["draft_0"] == 1 <= calls["draft_20"] <= steps
    assert case.arms["kept"]().tokens() == text.labels
    bench.check(case)


def test_least_bytes_are_those_of_the_tensors_that_a_step_reads(text):
    model = text.model
    weights = decoders.decoder_weights(model, keys_values=True)
    layers = sum(weight.numel() for weight in model.layers.parameters())
    assert weights == layers + model.embedding.weight.numel() + 33 + 2 * 112
    for_frames = [
        layer.cross_attention.key_value.parameters() for layer in model.layers
    ]
    unread = sum(weight.numel() for layer in for_frames for weight in layer)
    assert decoders.decoder_weights(model, keys_values=False) == weights - unread > 0
    one = planted_text(planted_decoder(**SMALL), 1, 20)
    steps, L, D, T = 1 + len(one.labels[0]), 2, 112, 20
    frames = 2 * L * D * T
    past = sum(2 * L * D * place for place in range(1, 1 + steps))
    for name, wanted in {
        "KV cache": steps * (weights - unread + frames) + past,
        "absorbed": steps * (weights + D * T) + past,
        "NeMo 3.0": steps * (weights + D * T) + past // 2,
    }.items():
        assert decoders.least_bytes(one, POLICIES[name]) == 4 * wanted


def test_an_utterance_that_has_ended_reads_nothing_more(text):
    longest = max(text.labels, key=len)
    assert len(longest) > len(min(text.labels, key=len))
    full, policy = replace(text, labels=[longest] * 3), POLICIES["KV cache"]
    assert decoders.least_bytes(text, policy) < decoders.least_bytes(full, policy)


def test_bfloat16_has_a_tolerance_of_its_own(plan):
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.2)):
        made = decoders.transducer(plan.to("cpu", dtype), "cpu", ("frame_looping",))
        assert made.tolerance == tolerance
        assert f"torch.{made.params['dtype']}" == str(dtype)
