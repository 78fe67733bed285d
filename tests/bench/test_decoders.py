"""How cases of decoding are made: what is counted of an arm, and that counting leaves the model as it was."""

import pytest
import torch

from asrkit.bench import decoders
from asrkit.bench.planted import planted
from asrkit.decoders import transducer_greedy
from asrkit.decoders.transducer.graphs import fingerprint
from asrkit.profiling import launch_profile


@pytest.fixture
def plan():
    return planted(2, 30, V=33, width=240)


def test_counting_leaves_the_model_as_its_graphs_know_it(plan, monkeypatch):
    """Graphs are captured again where the fingerprint changes: counting would cost every arm its graph."""
    known, seen = tuple(fingerprint(plan.model)), []

    def watched(model, *given, **how):
        seen.append((type(model).__name__, tuple(fingerprint(plan.model)) == known))
        return transducer_greedy(model, *given, **how)

    monkeypatch.setattr(decoders, "transducer_greedy", watched)
    case = decoders.transducer(plan, "cpu", {"label_looping": {}}, torch.float32, "greedy")
    assert seen == [("Counting", True)]
    case.run("label_looping")
    assert seen[1:] == [("TransducerModel", True)]


@pytest.mark.parametrize("mode", ["step", "full"])
def test_counts_of_a_graph_are_of_its_replay_not_of_its_capture(plan, monkeypatch, mode):
    models = []

    def captures_once(model, encoded, lengths, **how):
        for _ in range(1 if models else 50):
            encoded + 1
        models.append(model)

    monkeypatch.setattr(decoders, "transducer_greedy", captures_once)
    case = decoders.transducer(plan, "cpu", {f"label_looping_{mode}": {"graphs": mode}}, torch.float32, "greedy")
    assert case.of_arm == {f"label_looping_{mode}": {"launches": 1, "syncs": 0}}  # no joint: a replay has no calls to see
    assert all(model is plan.model for model in models)  # which is what the graph was captured for


def test_an_arm_is_counted_without_the_profiler(plan, monkeypatch):
    """It keeps an event for each op, and frame looping has tens of thousands."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: pytest.fail("profiled"))
    assert decoders.counts(lambda: torch.ones(3) + 1, "cuda") == {"launches": 0, "syncs": 0}  # these are the CPU's
    with pytest.raises(pytest.fail.Exception, match="profiled"):
        launch_profile(lambda: None, device="cuda")


def test_an_arm_that_ends_the_gpus_context_ends_the_making_of_cases(plan, monkeypatch):
    tried = []

    def fails(model, encoded, lengths, **how):
        tried.append(how["strategy"])
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(decoders, "transducer_greedy", fails)
    monkeypatch.setattr(decoders, "expect_alive", lambda device: fails(*3 * [None], strategy="synchronize"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        decoders.transducer(plan, "cpu", {name: {"strategy": name} for name in decoders.LOOPS}, torch.float32, "greedy")
    assert tried == ["frame_looping", "synchronize"]
