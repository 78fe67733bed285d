"""Cases of decoding: the calls that are counted, and tolerances."""

from functools import partial
from itertools import product

import pytest
import torch

from asrkit.workbench.lessons.shared.planted import (
    planted,
    planted_decoder,
    planted_text,
)
from asrkit.workbench.measure.comparison import check
from benchmarks.suites import decoders

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


def test_an_arm_that_cannot_run_is_reported_and_left_out(plan, capsys):
    variants = {"plain": {"graphs": "off"}, "graph": {"graphs": "full"}}
    arguments = (plan.model, partial(decoders._decode_transducer, plan))
    arms, params = decoders._counted(*arguments, variants, "cpu")
    assert [*arms] == [*params] == ["plain"]
    assert "graph is left out: graphs: expected" in capsys.readouterr().err


def test_calls_of_the_decoder_are_counted_and_a_right_draft_takes_one(decoder, text):
    case = decoders.attention(decoder, 3, 40, "cpu")
    calls = {name: params["follow"] for name, params in case.arm_params.items()}
    drafts = {f"draft_{per_cent}" for per_cent in decoders.ERRORS}
    assert {*case.arms} == {*calls} == {*decoders.CACHES, "kept_packed"} | drafts
    steps = case.params["steps"]
    assert calls["kept"] == calls["recomputed"] == calls["absorbed"] == steps > 5
    assert calls["draft_0"] == 1 <= calls["draft_20"] <= steps
    assert case.arms["kept"]().tokens() == text.labels
    check(case)


def test_on_a_gpu_every_batched_loop_also_runs_in_graphs(plan, monkeypatch):
    def counted(model, decode, variants, device):
        return dict.fromkeys(variants, tuple), {}

    monkeypatch.setattr(decoders, "_counted", counted)
    case = decoders.transducer(plan, "cuda", decoders.LOOPS)
    graphs = {*product(decoders.LOOPS, ("step", "full"))}
    assert {*case.arms} == {*decoders.LOOPS, *map("_".join, graphs)}
    assert {(loop, f"{loop}_{mode}") for loop, mode in graphs} < {*case.pairs()}
    *_, last = case.arms
    assert last == "windowed_looping_full"  # NeMo's graphs are compared with it


def test_bfloat16_has_a_tolerance_of_its_own(plan):
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.2)):
        case = decoders.transducer(plan.to("cpu", dtype), "cpu", ("frame_looping",))
        assert case.tolerance == tolerance
        assert f"torch.{case.params['dtype']}" == str(dtype)
