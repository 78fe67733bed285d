"""The claims that need a GPU: the suite measures what the ledger asks for, by its names, and says nothing of a GPU on a CPU."""

from dataclasses import replace

import pytest

from asrkit.workbench import bench
from asrkit.workbench import claims as ledger
from asrkit.workbench.bench.suites import claims

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = {claim.id: claim for claim in ledger.load_claims()}


@pytest.fixture(scope="module")
def found():
    return bench.run("claims", quick=True)


def cases(claim, device="cpu"):
    return [*claims.STUDIES[claim](claims.Study(claim, device, True))]


def test_every_study_is_of_a_claim_that_needs_a_gpu():
    assert {ASKED[name].needs for name in claims.STUDIES} == {"cuda"}
    assert {*claims.STUDIES} > claims.GPU_CLAIMS and len(claims.STUDIES) > 20


def test_records_have_metric_unit_and_arms_of_their_claims_and_a_cpu_settles_none(
    found,
):
    decisive = [
        one
        for one in found
        if one["metric"] == ASKED[one["what"]].metric
        and one["unit"] == ASKED[one["what"]].unit
    ]
    assert {one["what"] for one in decisive} == {*claims.STUDIES} - claims.GPU_CLAIMS
    for one in decisive:
        claim = ASKED[one["what"]]
        assert one["params"].get("arms", []) == [*claim.arms], claim.id
        assert one["params"]["quick"] and one["stats"]["n"] >= 3
        assert ledger.verdict(claim, found).measured is None
        on_gpu = {**one, "params": one["params"] | {"device": "cuda"}}
        assert ledger.verdict(claim, [on_gpu], one["machine"]).measured is None, (
            "toy sizes settle something"
        )
        del on_gpu["params"]["quick"]
        seen = ledger.verdict(claim, [on_gpu], one["machine"])
        assert seen.measured == one["value"], (claim.id, seen)
        if one["metric"] == "share":
            assert 0 <= one["value"] < 1


@pytest.mark.parametrize("name", ["normalize", "ctc_greedy"])
def test_a_front_end_that_differs_from_its_loop_is_not_measured(monkeypatch, name):
    plain = getattr(claims, name)
    wrong = {
        "normalize": lambda features, lengths: plain(features, lengths) * 1.01,
        "ctc_greedy": lambda *given: replace(
            found := plain(*given), labels=found.labels.clamp(min=0) + 1
        ),
    }
    (case,) = cases("ctc-frontend-batched")
    bench.check(case)
    monkeypatch.setattr(claims, name, wrong[name])
    with pytest.raises(AssertionError, match="both_batched disagrees with"):
        bench.check(case)


@pytest.fixture
def graphs(monkeypatch):
    """Graphs without a GPU: the plain loop decodes; `wrong` modes find something else."""
    wrong = set()
    plain = claims.transducer_greedy

    def decode(*given, graphs, **options):
        found = plain(*given, graphs="off", **options)
        return replace(found, labels=found.labels + 1) if graphs in wrong else found

    monkeypatch.setattr(claims, "transducer_greedy", decode)
    return wrong


@pytest.mark.parametrize(
    "claim",
    [
        "graphs-cut-launches",
        "graphs-label-looping-rnnt",
        "graphs-label-looping-tdt",
        "rnnt-near-ctc",
    ],
)
def test_arms_by_graphs_are_those_of_the_claim_and_wrong_ones_are_not_measured(
    graphs, claim
):
    (case,) = cases(claim)
    assert (*case.arms,) == (*ASKED[claim].arms,) and case.what == claim
    bench.check(case)
    graphs.add("full")
    _, failures = bench.compare_arms(case)
    (left,) = failures
    assert left in ("graph", "windowed_looping_full", "rnnt")
    assert "disagrees with planted" in failures[left]


@pytest.mark.parametrize("claim", ["decoder-3x", "decoder-bottleneck"])
def test_an_attention_decoder_that_finds_something_else_is_not_measured(
    monkeypatch, claim
):
    plain = claims.aed_greedy

    def wrong(*given, **options):
        found = plain(*given, **options)
        return replace(found, labels=found.labels + 1)

    monkeypatch.setattr(claims, "aed_greedy", wrong)
    with pytest.raises(AssertionError, match="planted"):
        [bench.check(case) for case in cases(claim)]


def test_idle_is_the_share_without_kernels(monkeypatch):
    monkeypatch.setattr(claims, "kernels_ms", lambda call: 1e-3)
    for claim in ("rnnt-gpu-idle", "launch-bound-small-batch"):
        *_, case = cases(claim)
        (one,) = case.measure()
        assert (one.what, one.metric, one.unit) == (claim, "share", "1")
        assert 0.9 < one.value < 1
    assert one.params["shape"][0] == 1  # the newest is of the small batch
