"""The claims that need a GPU: the suite measures what the ledger asks for, by its names, and says nothing of a GPU on a CPU."""

from dataclasses import replace

import pytest

from asrkit.transcribe import Recognizer
from asrkit.transcribe import decoding as decoding_table
from asrkit.workbench import bench
from asrkit.workbench import claims as ledger
from asrkit.workbench.bench.suites import claims, claims_frontend

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = {claim.id: claim for claim in ledger.load_claims()}
MORE = {
    "recogniser-batch",
    "ctc-greedy-share",
}  # rates of whole recognisers; a share where the ledger has milliseconds
MORE |= {"decoder-bottleneck-kept", "decoder-3x-kept"}  # not as published


@pytest.fixture(scope="module")
def found():
    return bench.run("claims", quick=True)


def test_every_study_is_of_claims_that_need_a_gpu():
    ids = {
        name
        for studies in claims.STUDIES.values()
        for names in studies
        for name in names
    }
    assert {ASKED[name].needs for name in ids} == {"cuda"} and len(ids) > 15


def test_records_have_metric_unit_and_arms_of_their_claims_and_a_cpu_settles_none(
    found,
):
    assert {
        "half-over-autocast",
        "label-looping-2x",
        "rnnt-near-ctc",
        "preprocessor-norm-share",
    } <= {one["what"] for one in found}
    for one in found:
        if one["what"] not in MORE:
            claim = ASKED[one["what"]]
            assert (one["metric"], one["unit"]) == (claim.metric, claim.unit), claim.id
            assert one["params"].get("arms", []) == [*claim.arms], claim.id
            assert one["params"]["quick"] and one["params"]["suite"] == "claims"
            assert (
                one["stats"]["n"] >= 3 and ledger.verdict(claim, found).measured is None
            )
            on_gpu = {**one, "params": one["params"] | {"device": "cuda"}}
            assert ledger.verdict(claim, [on_gpu], one["machine"]).measured is None, (
                "toy sizes settle something"
            )
            del on_gpu["params"]["quick"]
            seen = ledger.verdict(claim, [on_gpu], one["machine"])
            assert seen.measured == one["value"], (claim.id, seen)


@pytest.mark.parametrize("name", ["normalize", "ctc_greedy"])
def test_a_front_end_that_differs_from_its_loop_is_not_measured(monkeypatch, name):
    plain = getattr(claims_frontend, name)
    wrong = {
        "normalize": lambda features, lengths: plain(features, lengths) * 1.01,
        "ctc_greedy": lambda *given: replace(
            found := plain(*given), labels=found.labels.clamp(min=0) + 1
        ),
    }
    monkeypatch.setattr(claims_frontend, name, wrong[name])
    (study,) = claims.suite("cpu", True, only=("frontends",))
    found = list[str]()
    with pytest.raises(AssertionError, match="apart, of|integers differ"):
        found.extend(one.what for one in study.measure())
    assert found == [
        "preprocessor-norm-share",
        "preprocessor-10ms",
        "ctc-greedy-share",
    ]  # of the loops alone


def test_a_decoder_that_hears_something_else_is_not_measured(monkeypatch):
    monkeypatch.setattr(
        claims,
        "transducer_greedy",
        lambda model, encoded, lengths, **way: claims.ctc_greedy(encoded, lengths),
    )
    with pytest.raises(AssertionError, match="finds other labels than were planted"):
        [*next(claims.suite("cpu", True, only=("loops",))).measure()]


def decoding(monkeypatch, graph):
    """Graphs without a GPU: the plain loop decodes, unless `graph` has something else for a mode."""
    plain = claims.transducer_greedy

    def decode(*given, graphs="off", **how):
        return graph(graphs, lambda: plain(*given, graphs="off", **how))

    ways = claims.graph_options("cuda")
    for place in (claims, decoding_table):
        monkeypatch.setattr(place, "transducer_greedy", decode)
    monkeypatch.setattr(claims, "graph_options", lambda device: ways)
    monkeypatch.setattr(Recognizer, "_check", lambda self, model: None)


@pytest.mark.parametrize(
    ("wrong", "left"),
    [("full", "windowed_looping_step"), ("step", "windowed_looping_full")],
)
def test_graphs_that_are_wrong_leave_the_others_and_the_loops_to_be_measured(
    monkeypatch, wrong, left
):
    def graph(mode, decode):
        found = decode()
        return replace(found, labels=found.labels + 1) if mode == wrong else found

    decoding(monkeypatch, graph)
    found = dict[str, str]()
    study = next(claims.suite("cpu", True, only=("loops",)))
    with pytest.raises(
        AssertionError,
        match="^windowed_looping_\\w+ finds other labels than were planted",
    ):
        found.update((one.what, one.params.get("graph", "")) for one in study.measure())
    assert found == {
        "label-looping-2x": "",
        "label-looping-faster": "",
        "graphs-cut-launches": left,
    }
