"""How cases of decoding are made: what is counted of an arm, and that counting leaves the model as it was."""

import pytest
import torch

from asrkit.workbench.bench.planted import planted
from asrkit.workbench.bench.suites import decoders


@pytest.fixture
def plan():
    return planted(2, 30, V=33, width=240)


def test_an_arm_that_runs_but_cannot_be_counted_stays_and_says_why(plan, monkeypatch):
    def broken(call, device):
        raise RuntimeError("broken triton\nline 2")

    monkeypatch.setattr(decoders, "counts", broken)
    case = decoders.transducer(
        plan, "cpu", {"windowed_looping": {}}, torch.float32, "greedy"
    )
    assert case.arm_params == {
        "windowed_looping": {"not_counted": "broken triton"}
    } and [*case.arms] == ["windowed_looping"]


@pytest.mark.parametrize("mode", ["step", "full"])
def test_counts_of_a_graph_are_of_its_replay_not_of_its_capture(
    plan, monkeypatch, mode
):
    models = []

    def captures_once(model, encoded, lengths, **how):
        for _ in range(1 if models else 50):
            encoded + 1
        models.append(model)

    monkeypatch.setattr(decoders, "transducer_greedy", captures_once)
    case = decoders.transducer(
        plan,
        "cpu",
        {f"windowed_looping_{mode}": {"graphs": mode}},
        torch.float32,
        "greedy",
    )
    assert case.arm_params == {
        f"windowed_looping_{mode}": {"launches": 1, "syncs": 0}
    }  # no joint: a replay has no calls to see
    assert all(
        model is plan.model for model in models
    )  # which is what the graph was captured for


def test_graphs_have_an_arm_each_and_one_that_cannot_run_has_none(
    plan, monkeypatch, capsys
):
    asked = dict[str, str]()

    def transducer(plan, device, ways, dtype, what):
        asked.update({name: way["graphs"] for name, way in ways.items()})
        return decoders.Case(
            what=what, arms=dict.fromkeys(ways, tuple), params={"shape": [1]}
        )

    made = decoders.transducer
    monkeypatch.setattr(decoders, "transducer", transducer)
    (case,) = decoders.versus_nemo(plan, "cuda")
    modes = {f"windowed_looping_{mode}": mode for mode in ("step", "full")}
    assert {name: mode for name, mode in asked.items() if mode != "off"} == modes
    assert {(name, "windowed_looping") for name in modes} <= {*case.ratios}
    assert [*case.peers.against.values()] == ["windowed_looping_full"]
    ways = {"windowed_looping": {}} | decoders.by_graphs(["step"])
    arms = made(plan, "cpu", ways, torch.float32, "greedy").arms
    assert [*arms] == ["windowed_looping"]
    assert (
        "windowed_looping_step is left out: graphs: expected" in capsys.readouterr().err
    )


def test_on_a_gpu_the_cases_come_in_the_order_of_their_worth(monkeypatch):
    def made(plan, device, ways, dtype, what):
        shape = [*plan.encoded.shape[:2]]
        params = {"shape": shape, "dtype": str(dtype)[6:]}
        return decoders.Case(what=what, arms=dict.fromkeys(ways, tuple), params=params)

    monkeypatch.setattr(
        decoders, "planted", lambda B, T, **_: planted(B, T, V=33, width=240)
    )
    monkeypatch.setattr(decoders, "transducer", made)
    monkeypatch.setattr(decoders, "write", lambda *given: None)
    monkeypatch.setattr(decoders, "ctc", lambda plan, device: decoders.Case(what="ctc"))
    cases = [*decoders.suite("cuda", False)]
    first = [(32, 187), (1, 187), (128, 62), (8, 187)]
    shapes = [(*case.params["shape"],) for case in cases[:8]]
    assert shapes == [size for size in first for _ in ("rnnt", "tdt")]
    assert [case.dtype for case in cases[:9]] == ["bfloat16"] * 8 + ["float32"]
    assert ["one_by_one" in case.arms for case in cases[-6:-4]] == [True, True]
    assert [case.what for case in cases[-4:]] == ["ctc"] * 4
