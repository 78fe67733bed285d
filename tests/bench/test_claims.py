"""The claims that need a GPU: the suite measures what the ledger asks for, by its names, and says nothing of a GPU on a CPU."""

import re
from dataclasses import replace

import pytest

from asrkit import bench, ledger
from asrkit.bench import claims

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = {claim.id: claim for claim in ledger.load_claims()}
MORE = {"recogniser-batch", "ctc-greedy-share"}  # rates of whole recognisers; a share where the ledger has milliseconds


@pytest.fixture(scope="module")
def found():
    return bench.run("claims", quick=True)


def test_the_sizes_are_those_that_the_claims_name():
    params = ASKED["cast-200us"].params
    sizes = {"width": claims.WIDTH, "inner": claims.INNER, "utterances": claims.UTTERANCES, "seconds": claims.SECONDS}
    assert {name: params[name] for name in sizes} == sizes and params["frames_per_second"] == claims.FRAMES_PER_SECOND


def test_every_study_is_of_claims_that_need_a_gpu():
    ids = {name for names in claims.STUDIES for name in names}
    assert {ASKED[name].needs for name in ids} == {"cuda"} and len(ids) > 15


def test_records_have_metric_unit_and_arms_of_their_claims_and_a_cpu_settles_none(found):
    assert {"half-over-autocast", "label-looping-2x", "rnnt-near-ctc", "preprocessor-norm-share"} <= {one["what"] for one in found}
    for one in found:
        if one["what"] not in MORE:
            claim = ASKED[one["what"]]
            assert (one["metric"], one["unit"]) == (claim.metric, claim.unit), claim.id
            assert one["params"].get("arms", []) == [*claim.arms], claim.id
            assert one["params"]["quick"] and one["params"]["suite"] == "claims"
            assert one["stats"]["n"] >= 3 and ledger.verdict(claim, found).measured is None
            on_gpu = {**one, "params": one["params"] | {"device": "cuda"}}
            assert ledger.verdict(claim, [on_gpu], one["machine"]).measured is None, "toy sizes settle something"
            del on_gpu["params"]["quick"]
            seen = ledger.verdict(claim, [on_gpu], one["machine"])
            assert seen.measured == one["value"] or seen.label == "ill-defined", (claim.id, seen)


def test_what_failed_its_check_is_not_among_the_arms():
    study = next(claims.suite("cpu", True, without=re.compile("^nested_loops$")))
    assert "nested_loops" not in {one.impl for one in study.measurements()}
    studies = {study.ids: study for study in claims.suite("cpu", True, without=re.compile("^bfloat16$"))}
    assert studies[("half-over-autocast",)].measurements() == []


def test_a_cpu_has_toy_sizes_only():
    assert next(claims.suite("cpu", False)).make.args[:2] == ("cpu", True)
    assert next(claims.suite("cuda", False)).make.args[:2] == ("cuda", False)


@pytest.mark.parametrize("name", ["normalize", "ctc_greedy"])
def test_a_front_end_that_differs_from_its_loop_is_not_measured(monkeypatch, name):
    plain = getattr(claims, name)
    wrong = {
        "normalize": lambda features, lengths: plain(features, lengths) * 1.01,
        "ctc_greedy": lambda *given: replace(found := plain(*given), labels=found.labels.clamp(min=0) + 1),
    }
    monkeypatch.setattr(claims, name, wrong[name])
    (study,) = (study for study in claims.suite("cpu", True) if "ctc-frontend-batched" in study.ids)
    with pytest.raises(AssertionError, match="apart, of|integers differ"):
        study.measurements()


def test_a_decoder_that_hears_something_else_is_not_measured(monkeypatch):
    monkeypatch.setattr(claims, "transducer_greedy", lambda model, encoded, lengths, **way: claims.ctc_greedy(encoded, lengths))
    with pytest.raises(AssertionError, match="finds other labels than were planted"):
        next(claims.suite("cpu", True)).measurements()
