"""The claims that need a GPU: the suite measures what the ledger asks for, by its names, and says nothing of a GPU on a CPU."""

from dataclasses import replace

import pytest

from asrkit.transcribe import Recognizer
from asrkit.transcribe import decoding as decoding_table
from asrkit.workbench import bench, ledger, records
from asrkit.workbench.bench.planted import planted
from asrkit.workbench.bench.studies import StudyRecords
from asrkit.workbench.bench.suites import claims, claims_frontend

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = {claim.id: claim for claim in ledger.load_claims()}
MORE = {
    "recogniser-batch",
    "ctc-greedy-share",
}  # rates of whole recognisers; a share where the ledger has milliseconds
MORE |= {"rnnt-greedy-graphs", "tdt-greedy-graphs"}  # which no claim is about
MORE |= {"decoder-bottleneck-kept", "decoder-3x-kept"}  # not as published


@pytest.fixture(scope="module")
def found():
    return bench.run("claims", quick=True)


def test_the_sizes_are_those_that_the_claims_name():
    params = ASKED["cast-200us"].params
    sizes = {
        "width": claims_frontend.WIDTH,
        "inner": claims_frontend.INNER,
        "utterances": claims_frontend.UTTERANCES,
        "seconds": claims_frontend.SECONDS,
    }
    assert {name: params[name] for name in sizes} == sizes and params[
        "frames_per_second"
    ] == claims_frontend.FRAMES_PER_SECOND


def test_every_study_is_of_claims_that_need_a_gpu():
    ids = {name for studies in claims.STUDIES.values() for names in studies for name in names}
    assert {ASKED[name].needs for name in ids} == {"cuda"} and len(ids) > 15


def test_records_have_metric_unit_and_arms_of_their_claims_and_a_cpu_settles_none(found):
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
            assert one["stats"]["n"] >= 3 and ledger.verdict(claim, found).measured is None
            on_gpu = {**one, "params": one["params"] | {"device": "cuda"}}
            assert ledger.verdict(claim, [on_gpu], one["machine"]).measured is None, (
                "toy sizes settle something"
            )
            del on_gpu["params"]["quick"]
            seen = ledger.verdict(claim, [on_gpu], one["machine"])
            assert seen.measured == one["value"], (claim.id, seen)


def test_what_was_found_stays_when_the_rest_of_a_study_or_another_of_its_group_fails(
    monkeypatch, tmp_path
):
    plain, measured = StudyRecords.ratio, claims.measure

    def ratio(self, what, *given, **params):
        if what == "label-looping-faster":
            raise RuntimeError("no such kernel")
        return plain(self, what, *given, **params)

    monkeypatch.setattr(StudyRecords, "ratio", ratio)
    with pytest.raises(
        AssertionError,
        match="^claims: label-looping-2x, label-looping-faster: RuntimeError: no such kernel$",
    ):
        bench.run("claims", quick=True, only=("loops",), out=tmp_path / "out.jsonl")
    assert {one["what"] for one in records.read(tmp_path / "out.jsonl")} == {
        "label-looping-2x",
        "label-looping-tdt-3.8x",
    }

    def fails(arms, **how):
        return (
            measured(arms, **how)
            if len({*arms} & {"ctc"})
            else exec("raise RuntimeError('no room')")
        )

    monkeypatch.setattr(claims, "measure", fails)
    with pytest.raises(
        AssertionError, match="^claims: graphs-label-looping-tdt: RuntimeError: no room$"
    ):
        bench.run("claims", quick=True, only=("recognisers",), out=tmp_path / "out.jsonl")
    found = records.read(tmp_path / "out.jsonl")
    assert "rnnt-near-ctc" in {one["what"] for one in found}, "RNN-T's numbers went with TDT's"


def test_windows_are_measured_with_every_kind_of_graph_on_a_gpu_and_without_here(monkeypatch):
    asked = list[tuple]()

    def transducer(plan, device, ways, dtype, what):
        asked.append(
            (
                bool(plan.model.durations),
                len(plan.lengths),
                {name: (*way.values(),) for name, way in ways.items()},
            )
        )
        return bench.Case(
            what=what,
            arms=dict.fromkeys(ways, tuple),
            params={"shape": [1], "dtype": str(dtype)[6:]},
        )

    monkeypatch.setattr(claims.decoders, "transducer", transducer)
    monkeypatch.setattr(
        claims,
        "planted",
        lambda B, T, durations, **sizes: planted(B, 8, V=33, width=240, durations=durations),
    )
    made = [*claims.suite("cuda", False, only=("windows",))]
    assert [one[:2] for one in asked] == [(False, 1), (False, 16), (True, 1), (True, 16)]
    ways = {f"window_{size}_{mode}": (mode, size) for size in (8, 1) for mode in ("step", "full")}
    ways |= {f"window_{size}_off": (size, "off") for size in (8, 1)}
    assert all(one[2] == ways for one in asked)
    assert {
        ("window_8_off", "window_8_step"), ("window_8_off", "window_8_full"), ("window_1_off", "window_1_full"),
    } <= {*made[0].ratios}  # fmt: skip
    assert all(
        {*pair} <= {*ways} and one.params["dtype"] == "bfloat16"
        for one in made
        for pair in one.ratios
    )
    assert [one.ratios for one in claims.suite("cpu", True, only=("windows",))] == [
        [("window_1_off", "window_8_off")]
    ] * 2


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
        AssertionError, match="^windowed_looping_\\w+ finds other labels than were planted"
    ):
        found.update((one.what, one.params.get("graph", "")) for one in study.measure())
    assert found == {
        "label-looping-2x": "",
        "label-looping-faster": "",
        "graphs-cut-launches": left,
    }


def test_a_graph_that_cannot_run_is_no_arm_and_the_reason_is_named(monkeypatch, capsys):
    def graph(mode, decode):
        if mode == "step":
            raise RuntimeError("graphs='step': capture failed, RuntimeError: out of memory")
        return decode()

    decoding(monkeypatch, graph)
    found = [*claims._recognisers("parakeet_tdt_1_1b", "cpu", True)]
    assert {one.impl for one in found if one.what == "recogniser-batch"} == {
        "windowed_looping_off",
        "windowed_looping_full",
    }
    (whole,) = (one for one in found if one.what == "graphs-label-looping-tdt")
    assert whole.params["graph"] == "windowed_looping_full"
    assert whole.params["arms"] == [*ASKED[whole.what].arms]
    errors = capsys.readouterr().err
    wanted = "windowed_looping_step of tdt-recogniser is left out: graphs='step': capture failed"
    assert wanted in errors
