"""The claims that need a GPU: records have the ledger's names, metrics and arms, and a CPU settles no claim."""

from dataclasses import replace

import pytest

from asrkit.workbench import claims as ledger
from asrkit.workbench.measure.comparison import check, compare_arms
from benchmarks.harness.runner import run
from benchmarks.suites import claims

pytestmark = pytest.mark.usefixtures("one_thread")
CLAIMS = {claim.id: claim for claim in ledger.load_claims()}


@pytest.fixture(scope="module")
def found():
    return run("claims", quick=True)


def cases(claim, device="cpu"):
    return [*claims.STUDIES[claim](claims.Study(claim, device, True))]


def test_every_study_is_of_a_claim_that_needs_a_gpu():
    assert {CLAIMS[name].needs for name in claims.STUDIES} == {"cuda"}
    assert {*claims.STUDIES} > claims.GPU_CLAIMS
    assert len(claims.STUDIES) > 15


def test_records_have_metric_unit_and_arms_of_their_claims_and_a_cpu_settles_none(
    found,
):
    decisive = [
        record
        for record in found
        if (CLAIMS[record["what"]].metric, CLAIMS[record["what"]].unit)
        == (record["metric"], record["unit"])
    ]
    assert {record["what"] for record in decisive} == {
        *claims.STUDIES
    } - claims.GPU_CLAIMS
    for record in decisive:
        claim, params = CLAIMS[record["what"]], record["params"]
        assert params.get("arms", []) == [*claim.arms], claim.id
        assert params["quick"]
        assert ledger.verdict(claim, found).measured is None
        params = params | {"device": "cuda"}
        toy = {**record, "params": params}
        assert ledger.verdict(claim, [toy], record["machine"]).measured is None
        del params["quick"]
        seen = ledger.verdict(claim, [toy], record["machine"])
        assert seen.measured == record["value"], (claim.id, seen)


def wrong_features(features, *_):
    return 1.01 * features


def wrong_labels(found, *_):
    return replace(found, labels=found.labels.clamp(min=0) + 1)


@pytest.mark.parametrize("name, wrong", [
    ("normalize", wrong_features), ("ctc_greedy", wrong_labels),
])  # fmt: skip
def test_a_front_end_that_differs_from_its_loop_is_not_measured(
    monkeypatch, name, wrong
):
    plain = getattr(claims, name)
    (case,) = cases("ctc-frontend-batched")
    check(case)
    monkeypatch.setattr(claims, name, lambda *arguments: wrong(plain(*arguments)))
    with pytest.raises(AssertionError, match="both_batched disagrees with"):
        check(case)


@pytest.fixture
def graphs(monkeypatch):
    """Graphs without a GPU: the plain loop decodes; modes in `wrong` return other labels."""
    wrong = set()
    plain = claims.transducer_greedy

    def decode(*arguments, graphs, **options):
        found = plain(*arguments, graphs="off", **options)
        return replace(found, labels=found.labels + 1) if graphs in wrong else found

    monkeypatch.setattr(claims, "transducer_greedy", decode)
    return wrong


@pytest.mark.parametrize("claim", ["graphs-label-looping-tdt", "rnnt-near-ctc"])
def test_arms_with_graphs_are_those_of_the_claim_and_wrong_ones_are_not_measured(
    graphs, claim
):
    (case,) = cases(claim)
    assert (*case.arms,) == (*CLAIMS[claim].arms,)
    check(case)
    graphs.add("full")
    _, failures = compare_arms(case)
    (message,) = failures.values()
    assert "disagrees with planted" in message


def test_idle_time_is_the_share_without_kernels(monkeypatch):
    monkeypatch.setattr(claims, "kernels_ms", lambda call: 1e-3)
    *_, case = cases("rnnt-gpu-idle")
    (measurement,) = case.measure()
    assert measurement.what == "rnnt-gpu-idle"
    assert measurement.metric == "share"
    assert measurement.unit == "1"
    assert 0.9 < measurement.value < 1
