"""Verdicts follow from claims and records alone, and never from another machine's."""

import copy
import csv

import pytest
import yaml

from asrkit import records
from asrkit.data import CANARY_MEMORY, at_most_seconds, shipped_lengths
from asrkit.ledger import LABELS, Claim, evaluate, load_claims, summary, table, verdict
from asrkit.records import Measurement

SOURCE = {"document": "000", "title": "A paper", "url": "a blog", "section": "2"}
CPU, GPU = {"id": "cpu", "gpus": []}, {"id": "gpu", "gpus": [{"name": "H200"}]}


def claim(**fields):
    given = {"id": "c", "text": "Twice as fast.", "source": SOURCE, "kind": "ratio", "metric": "ratio", "unit": "1", "quoted": 2.0,
             "notebook": "00", "arms": ("slow", "fast")}  # fmt: skip
    return Claim(**given | fields)


def record(value=2.0, samples=(1.9, 2.0, 2.1), machine=CPU, arms=("slow", "fast"), on_cpu=False, **fields):
    made = Measurement(
        **{"what": "c", "metric": "ratio", "unit": "1", "value": value, "samples": samples, "params": {"arms": list(arms)}} | fields
    )
    sealed = copy.deepcopy(made.sealed())
    sealed["params"]["device"] = "cuda" if machine["gpus"] and not on_cpu else "cpu"
    sealed["machine"] = {**sealed["machine"], **machine}
    return sealed


@pytest.mark.parametrize(
    ("samples", "label"),
    [
        ((1.9, 2.0, 2.1), "reproduced"), ((1.4, 1.5, 1.6), "direction only"), ((0.7, 0.8, 0.9), "not reproduced"),
        ((0.9, 1.1, 1.3), "not reproduced"), ((1.0, 2.0, 9.0), "too noisy"), ((2.0, 2.0), "too noisy"),
    ],
)  # fmt: skip
def test_a_ratio_is_judged_by_its_median_its_spread_and_its_direction(samples, label):
    middle = sorted(samples)[len(samples) // 2]
    assert verdict(claim(), [record(middle, samples)], CPU).label == label


def test_a_ratio_with_other_arms_or_another_name_is_no_evidence():
    for other in (record(arms=("slow", "else")), record(what="d"), record(metric="latency"), record(origin="derived")):
        assert verdict(claim(), [other], CPU).label == "not measured yet"


def test_what_another_machine_recorded_is_shown_but_decides_nothing():
    found = verdict(claim(), [record(machine=GPU)], CPU)
    assert (found.label, found.measured) == ("not measured yet", None)
    assert found.recorded["machine"]["id"] == "gpu"
    needs_gpu = verdict(claim(needs="cuda"), [record(machine=GPU)], CPU)
    assert (needs_gpu.label, needs_gpu.measured) == ("not measurable here", None)
    assert verdict(claim(needs="cuda"), [record(machine=GPU)], GPU).label == "reproduced"


def test_a_cpu_record_never_answers_a_claim_about_a_gpu():
    assert verdict(claim(needs="cuda"), [record()], CPU).label == "not measurable here"
    assert verdict(claim(needs="cuda"), [record(machine=GPU, on_cpu=True)], GPU).label == "not measured yet"


def test_the_newest_record_of_this_machine_counts():
    old, new = record(2.0), record(1.0, (0.9, 1.0, 1.1))
    old["captured_at"], new["captured_at"] = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    assert verdict(claim(), [new, old], CPU).measured == 1.0


def test_a_claim_without_number_or_baseline_is_ill_defined():
    assert verdict(claim(arms=()), [record(arms=())], CPU).label == "ill-defined"
    assert verdict(claim(quoted=None), [record()], CPU).label == "ill-defined"


@pytest.mark.parametrize(("quoted", "label"), [(1.6, "arithmetic checked"), (2.5, "not reproduced")])
def test_arithmetic_is_computed_not_believed(quoted, label):
    arithmetic = claim(kind="arithmetic", arms=(), formula="a * b / 10 ** 3", params={"a": 40, "b": 41}, quoted=quoted)
    found = verdict(arithmetic, [], CPU)
    assert (found.label, found.measured) == (label, 1.64)


@pytest.mark.parametrize("formula", ["__import__('os')", "a.real", "a if a else 1", "b + 1", "f(a)", "[a]"])
def test_a_formula_is_arithmetic_and_nothing_else(formula):
    with pytest.raises(ValueError, match="formula: expected numbers"):
        evaluate(formula, {"a": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "unknown field surprise"), ({"text": None}, "missing field text"), ({"kind": "guess"}, "kind one of"),
        ({"source": {"title": "x"}}, "a source with"), ({"quoted": "two"}, "a number or null"), ({"formula": "1"}, "a formula"),
        ({"arms": ["one"]}, "two arms or none"), ({"tolerance": {"rel": 1, "abs": 1}}, "one tolerance"),
    ],
)  # fmt: skip
def test_a_claim_that_breaks_the_schema_is_named(tmp_path, change, message):
    entry = {"id": "c", "text": "t", "source": SOURCE, "kind": "ratio", "metric": "ratio", "unit": "1", "quoted": 2.0,
             "notebook": "00", "arms": ["a", "b"]} | change  # fmt: skip
    entry = {key: value for key, value in entry.items() if value is not None}
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([entry]))
    with pytest.raises(ValueError, match=f"claim 'c': .*{message}"):
        load_claims(path)


def test_two_claims_of_one_name_are_refused(tmp_path):
    entry = {
        "id": "c",
        "text": "t",
        "source": SOURCE,
        "kind": "ratio",
        "metric": "ratio",
        "unit": "1",
        "quoted": None,
        "notebook": "0",
    }
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([entry, entry]))
    with pytest.raises(ValueError, match="duplicate id c"):
        load_claims(path)


def test_the_shipped_ledger_holds_and_its_arithmetic_is_right():
    claims = load_claims()
    assert len(claims) >= 10
    rows = table(claims, [])
    assert {row["verdict"] for row in rows} <= set(LABELS)
    assert all(row["verdict"] == "arithmetic checked" for claim, row in zip(claims, rows, strict=True) if claim.formula)
    assert summary(rows).startswith(f"{len(claims)} claims: ")


def test_records_that_the_project_ships_are_as_they_were_sealed():
    assert records.verify([records.shipped("records")]) == []


def test_what_the_documents_of_the_series_do_not_say_themselves_is_marked_as_secondary():
    for claim in load_claims():
        own = claim.source["document"] in {"000", "001", "002", "003", "004"}
        assert own or claim.notes.startswith("Secondary"), claim.id


def test_a_step_measured_alone_is_no_evidence_for_what_it_is_worth_to_the_whole():
    claims = {claim.id: claim for claim in load_claims()}
    for name in ("ctc-greedy-batched", "feature-norm-batched"):
        alone = record(1.1, (1.1,) * 3, machine=GPU, what=name, arms=("sequential", "batched"))
        whole = record(1.1, (1.1,) * 3, machine=GPU, what=name, arms=claims[name].arms)
        assert verdict(claims[name], [alone], GPU).label == "not measured yet"
        assert verdict(claims[name], [whole], GPU).label == "reproduced"
        assert verdict(claims[name], [whole], CPU).label == "not measurable here"


def test_the_claim_of_five_times_the_batch_is_reckoned_with_the_lengths_and_the_memory_that_the_package_ships():
    (claim,) = [claim for claim in load_claims() if claim.id == "batch-5x"]
    lengths = shipped_lengths("librispeech_train_clean_100")
    means = {"D": lengths.seconds.mean(), "D2": (lengths.seconds**2).mean(), "U": lengths.tokens.mean()}
    memory = {name: getattr(CANARY_MEMORY, name) for name in ("per_second", "per_token", "per_second2")}
    assert {name: claim.params[name] for name in {**means, **memory}} == pytest.approx({**means, **memory}, rel=1e-3)
    first = at_most_seconds(claim.params["batch_s"], quadratic=claim.params["quadratic"])
    shares = first.share(1, lengths.seconds, lengths.tokens).mean(), CANARY_MEMORY(1, lengths.seconds, lengths.tokens).mean()
    assert evaluate(claim.formula, claim.params) == pytest.approx(shares[0] / shares[1], rel=1e-3)


def test_every_published_run_stands_once_and_names_its_file_and_how_it_ended():
    folder = records.shipped("published")
    runs = list(csv.DictReader((folder / "mlperf_rnnt_runs.csv").read_text().splitlines()))
    assert len({(run["round"], run["file"]) for run in runs}) == len(runs) > 0
    assert all(run["file"].startswith("NVIDIA/results/") and int(run["epochs"]) > 0 for run in runs)
    assert {run["status"] for run in runs} == {"success", "aborted"}
    assert f"| {len(runs)} training runs" in (folder / "README.md").read_text()
