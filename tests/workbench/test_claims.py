"""Verdicts follow only from claims and records, and never from another machine's records."""

import hashlib
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from asrkit import files
from asrkit.data import CANARY_MEMORY, at_most_seconds, shipped_lengths
from asrkit.workbench import claims as ledger
from asrkit.workbench.claims import (
    Claim,
    claims_table,
    document_answers,
    evaluate,
    listed,
    load_claims,
    summary,
    verdict,
)
from asrkit.workbench.claims.answers import OUTCOMES, count_outcomes
from asrkit.workbench.records import Measurement
from benchmarks.suites import claims as claims_suite
from benchmarks.suites import jasper

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CLAIMS = {claim.id: claim for claim in load_claims()}
FINDINGS = {  # claims whose formula does not give the published number; all other formulas do
    "unet-9.7x": "not reproduced",  # 9.55 by the same text's table
    "batch-5x": "direction only",  # an estimate, with lengths and memory that are at hand
}
# Number of claims in each document, so that no claim is lost.
COUNTS = {"000": 16, "001": 25, "002": 11, "003": 15, "004": 50}
WORDS = {  # field of a claim -> its allowed values
    "kind": {"arithmetic", "ratio", "latency", "throughput", "memory", "quality"},
    "needs": {"cpu", "cuda", "cluster", "source"},
    "take": {"", "max", "min"},
    "appendix": {"", "tautology", "not speech", "ours"},
}
SOURCE = {"document": "000", "title": "A paper", "url": "a blog", "section": "2"}
CPU, GPU = {"id": "cpu", "gpus": []}, {"id": "gpu", "gpus": [{"name": "H200"}]}


def claim(**changed):
    given = {"id": "c", "text": "Twice as fast.", "source": SOURCE, "kind": "ratio", "metric": "ratio", "unit": "1", "quoted": 2.0,
             "notebook": "00", "arms": ("slow", "fast")}  # fmt: skip
    return Claim(**given | changed)


def record(
    value=2.0, samples=None, machine=CPU, arms=("slow", "fast"), device="", **more
):
    """A record of a machine; `more` are fields of a measurement, or sizes among its params."""
    fields = {"what": "c", "metric": "ratio", "impl": "", "origin": "measured"}
    named = {name: more.pop(name, default) for name, default in fields.items()}
    device = device or ("cuda" if machine["gpus"] else "cpu")
    params = {"arms": [*arms], "device": device, **more}
    samples = samples or (value,) * 3
    made = Measurement(unit="1", value=value, samples=samples, params=params, **named)
    found = made.record()
    return found | {"machine": found["machine"] | machine}


@pytest.mark.parametrize(("samples", "label"), [
    ((1.9, 2.0, 2.1), "reproduced"),
    ((1.4, 1.5, 1.6), "direction only"),
    ((0.7, 0.8, 0.9), "not reproduced"),
    ((0.9, 1.1, 1.3), "not reproduced"),
    ((1.0, 2.0, 9.0), "too noisy"),
    ((2.0, 2.0), "too noisy"),
])  # fmt: skip
def test_a_ratio_is_judged_by_its_median_its_spread_and_its_direction(samples, label):
    found = verdict(claim(notes="Only indoors."), [record(samples[1], samples)], CPU)
    assert found.label == label
    assert found.why.endswith(". Reproduced means within 10 % of 2×. Only indoors.")


@pytest.mark.parametrize(("change", "rule"), [
    ({"tolerance": {"above": 0}}, "above 2×"),
    ({"tolerance": {"rel": 0}}, "exactly 2×"),
    ({"kind": "latency", "metric": "share", "quoted": 0.8, "tolerance": {"abs": 0.03}}, "within 3 percentage points of 80 %"),
    ({"least": {"cores": 8}}, "within 10 % of 2× with at least 8 cores"),
    ({"quoted": None}, "–"),
])  # fmt: skip
def test_a_claims_rule_is_its_tolerance_in_words(change, rule):
    assert claim(**change).rule == rule


@pytest.mark.parametrize("other", [
    {"arms": ("slow", "else")},
    {"what": "d"},
    {"metric": "latency"},
    {"origin": "derived"},
    {"origin": "estimated"},
    {"quick": True},
])  # fmt: skip
def test_a_record_of_something_else_or_of_toy_sizes_is_no_evidence(other):
    assert verdict(claim(), [record(**other)], CPU).label == "not measured yet"


@pytest.mark.parametrize("value, there", [(2.0, "reproduced"), (1.4, "direction only")])
def test_another_machines_record_decides_nothing_here_and_is_shown_with_its_verdict_there(
    value, there
):
    made = record(value, machine=GPU)
    of_gpu = claim(needs="cuda")
    found = verdict(of_gpu, [made], CPU)
    assert (found.label, found.measured) == ("not measurable here", None)
    assert verdict(claim(), [made], CPU).label == "not measured yet"
    assert verdict(of_gpu, [made], GPU).label == there
    (row,) = claims_table([of_gpu], [made], CPU)
    assert row["recorded"].startswith(f"{value:g}× ({there} there) on H200, commit ")
    outcomes = {
        "reproduced": "reproduced by measurement",
        "direction only": "confirmed in part",
    }
    recorded = f"Recorded on H200: 1 {outcomes[there]}."
    assert summary([row]) == f"1 claim: 1 waiting for a GPU. {recorded}"


def test_a_cpu_record_never_answers_a_claim_about_a_gpu():
    for made, machine in ((record(), CPU), (record(machine=GPU, device="cpu"), GPU)):
        found = verdict(claim(needs="cuda"), [made], machine)
        assert (found.label, found.measured) == ("evidence, not comparable", 2.0)
        assert "measured on a CPU, and the claim is about a GPU" in found.why


def test_a_time_on_a_cpu_is_no_evidence_for_a_time_on_a_gpu():
    of_gpu = claim(needs="cuda", metric="latency", kind="latency", arms=())
    made = record(metric="latency", arms=())
    found = verdict(of_gpu, [made], CPU)
    assert (found.label, found.measured) == ("not measurable here", None)


def test_the_newest_record_of_this_machine_counts():
    old = record(2.0) | {"captured_at": "2026-01-01T00:00:00Z"}
    new = record(1.0) | {"captured_at": "2026-01-02T00:00:00Z"}
    assert verdict(claim(), [new, old], CPU).measured == 1.0


@pytest.mark.parametrize("vague", [claim(quoted=None, notes="Whose?"), claim(arms=())])
def test_a_claim_without_number_or_baseline_is_ill_defined_whatever_is_measured(vague):
    assert verdict(vague, [], CPU).label == "ill-defined"
    for machine, measured in ((CPU, 2.0), (GPU, None)):
        found = verdict(vague, [record(machine=machine, arms=vague.arms)], CPU)
        assert (found.label, found.measured) == ("evidence, not comparable", measured)
        assert "no number and baseline to compare with" in found.why


ALIKE = {"what": "alike", "arms": ("slow", "ours"), "impl": "x"}
BESIDE = claim(needs="cuda", evidence=[{**ALIKE, "why": "another loop"}])


@pytest.mark.parametrize("origin", ["measured", "estimated"])
def test_records_of_other_names_are_evidence_for_a_claim_that_names_them(origin):
    alike, deciding = record(2.4, **ALIKE, origin=origin), record(machine=GPU)
    found = verdict(BESIDE, [alike], CPU)
    assert (found.label, found.measured) == ("evidence, not comparable", 2.4)
    assert "2.4× (slow over ours)" in found.why and "another loop" in found.why
    assert verdict(BESIDE, [alike, deciding], GPU).label == "reproduced"
    for other in (deciding, record(**ALIKE | {"impl": "y"})):
        assert verdict(BESIDE, [other], CPU).label == "not measurable here"


@pytest.mark.parametrize(("sizes", "value", "label"), [
    ({"cores": 8}, 1.0, "reproduced"),
    ({"cores": 7}, 1.0, "direction only"),
    ({}, 1.0, "direction only"),
    ({"cores": 64}, 0.6, "not reproduced"),
])  # fmt: skip
def test_a_few_cores_confirm_only_the_direction_of_a_claim_about_many(
    sizes, value, label
):
    scaling = CLAIMS["cpu-linear-scaling"]
    made = record(value, what=scaling.id, arms=scaling.arms, **sizes)
    found = verdict(scaling, [made], CPU)
    assert found.label == label
    assert ("fewer than 8 confirm" in found.why) == (label == "direction only")


PRODUCT = {"kind": "arithmetic", "formula": "a * b / 10 ** 3", "params": {"a": 40, "b": 41}}  # fmt: skip


@pytest.mark.parametrize(("change", "label", "value"), [
    (PRODUCT | {"quoted": 1.6}, "arithmetic checked", 1.64),
    (PRODUCT | {"quoted": 2.5}, "not reproduced", 1.64),
    ({"formula": "15 / 2", "quoted": 5}, "direction only", 7.5),  # a ratio that is estimated
])  # fmt: skip
def test_arithmetic_is_recomputed(change, label, value):
    found = verdict(claim(arms=(), **change), [], CPU)
    assert (found.label, found.measured) == (label, value)


SPEEDUP = {"kind": "arithmetic", "metric": "lines", "unit": "lines", "quoted": 2, "arms": (), "grid": "table.csv",
           "keys": ("gpu", "batch", "half"),
           "base": {"half": 0}, "formula": "base_ms / ms", "column": "printed", "tolerance": {"abs": 0.0055}}  # fmt: skip
LINES = (
    "gpu,batch,half,ms,printed\nA,1,0,30,\nA,1,1,20,1.50\nB,8,0,90,\nB,8,1,20,4.50\n"
)


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Writes published/table.csv to the folder that the ledger reads, and clears its cache."""

    def write(text):
        (tmp_path / "published").mkdir()
        (tmp_path / "published/table.csv").write_text(text)
        ledger.published.cache_clear()

    monkeypatch.setattr("asrkit.workbench.tables.shipped", lambda name: tmp_path / name)
    yield write
    ledger.published.cache_clear()


LARGEST = {"take": "max", "column": "", "metric": "ratio", "unit": "1", "quoted": 4.5, "where": {"half": 1}}  # fmt: skip
ORDERED = {"column": "", "base": {}, "formula": "20 <= ms < 90", "quoted": 4}


@pytest.mark.parametrize(("text", "change", "label", "value", "why"), [
    (LINES, {}, "arithmetic checked", 2, "2 of 2 lines agree"),
    (LINES.replace("4.50", "4.40"), {}, "not reproduced", 1, "1 of 2 lines agree; not B, batch 8, half 1."),
    (LINES.partition("B,")[0], {}, "not reproduced", 1, "1 of 1 lines agree"),  # one line where two are claimed
    (LINES, LARGEST, "arithmetic checked", 4.5, "the max of 2 lines is at B, batch 8, half 1"),
    (LINES, ORDERED, "not reproduced", 3, "not B, batch 8, half 0."),
])  # fmt: skip
def test_a_grid_is_computed_line_by_line_and_what_is_off_is_named(
    grid, text, change, label, value, why
):
    grid(text)
    found = verdict(claim(**SPEEDUP | change), [], CPU)
    assert (found.label, found.measured) == (label, value) and why in found.why


def test_a_formula_may_ask_for_means_extremes_and_order():
    formula = "mean(a, 4) + max(a, 7) - min(a, 7) + pstdev(a, 4) + (1 < a <= 2)"
    assert evaluate(formula, {"a": 2}) == 3 + 5 + 1 + 1


def test_the_arithmetic_of_the_shipped_ledger_is_right():
    rows = claims_table(load_claims(), [])
    labels = {row["id"]: row["verdict"] for row in rows if CLAIMS[row["id"]].formula}
    assert labels == dict.fromkeys(labels, "arithmetic checked") | FINDINGS
    counts = Counter(row["document"] for row in rows)
    assert COUNTS.items() <= counts.items()


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_shipped_claim_stands_alone_and_its_fields_fit_together(claim):
    for name, words in WORDS.items():
        assert getattr(claim, name) in words
    (tolerance,) = claim.tolerance
    assert tolerance in {"rel", "abs", "above", "below"}
    assert bool(claim.grid) == bool(claim.keys)
    if claim.kind == "arithmetic" or claim.grid:
        assert claim.formula
    if claim.arms:
        assert claim.kind == "ratio" and len(claim.arms) == 2
    source = claim.source
    assert source["title"] and source["section"]
    assert re.fullmatch(r"https://[a-z0-9.]+\.[a-z]+/\S+", source["url"])
    # Claims that are not in the documents of the series are marked.
    assert source["document"] in COUNTS or claim.notes.startswith("Secondary")
    assert not re.match("(So|That|It|This|They|Or|These|Its|Then) ", claim.text)
    assert claim.text.endswith(".")


def test_every_published_table_is_unchanged_and_has_a_source():
    folder = files.shipped("published")
    readme = (folder / "README.md").read_text()
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in folder.glob("*.csv")
    }
    listed = re.findall(r"^ {4}([0-9a-f]{16}) (\S+)$", readme, re.MULTILINE)
    assert {name: digest for digest, name in listed} == digests
    assert all(f"| `{name}` | " in readme for name in digests)
    assert {claim.grid for claim in load_claims()} - {""} <= {*digests}


A100_64 = {"system": "DGX A100", "batch": 64, "precision": "mixed"}
FP16_16 = {"batch": 16, "duration_s": 16.7, "precision": "FP16"}
TWICE = {  # claims that quote one cell of a published table: the table, the column, the line
    "jasper-wer-a100": ("jasper_accuracy", "wer_percent", {"system": "DGX A100", "set": "test-clean"}),
    "jasper-wer-v100": ("jasper_accuracy", "wer_percent", {"system": "DGX-1 32GB", "set": "test-clean"}),
    "jasper-time-a100": ("jasper_accuracy", "train_hours", {"system": "DGX A100", "set": "dev-clean"}),
    "jasper-time-v100": ("jasper_accuracy", "train_hours", {"system": "DGX-1 32GB", "set": "dev-clean"}),
    "jasper-throughput-a100": ("jasper_training", "sequences_per_s", {**A100_64, "gpus": 1}),
    "jasper-mixed-a100": ("jasper_training", "speedup", {**A100_64, "gpus": 1}),
    "jasper-scaling-8": ("jasper_training", "weak_scaling", {**A100_64, "gpus": 8}),
    "jasper-latency-a100": ("jasper_inference", "avg_ms", {"system": "DGX A100", **FP16_16}),
    "jasper-fp16-a100": ("jasper_inference", "speedup", {"system": "DGX A100", **FP16_16}),
    "jasper-fp16-fp32": ("jasper_inference", "speedup", {"system": "DGX-1 32GB", **FP16_16}),
    "rnnt-2.75-min": ("mlperf_v1_0", "max_scale_min", {"workload": "RNN-T"}),
    "rnnt-309-min": ("mlperf_v1_0", "per_accelerator_min", {"workload": "RNN-T"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_a_cell_of_a_table_that_a_claim_quotes_is_the_same_in_both(name):
    table, column, where = TWICE[name]
    lines = ledger.published(f"{table}.csv")
    (line,) = [line for line in lines if where.items() <= line.items()]
    assert CLAIMS[name].quoted == line[column]


IN_SUITES = {*claims_suite.STUDIES, *jasper.LATENCY, *jasper.TRAINING}


def unread(claim):
    """Why the notebook of a claim neither reads nor measures it; empty if it does."""
    if not claim.is_defined:  # which nothing can settle
        return ""
    notebook = nbformat.read(NOTEBOOKS / f"{claim.notebook}.ipynb", 4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code = "\n".join(cells)
    is_named = f'"{claim.id}"' in code
    if not is_named and not ("load_claims" in code and f'"{claim.notebook}"' in code):
        return "its notebook does not read it"
    is_measured = is_named or claim.id in IN_SUITES or claim.formula
    if not is_measured and claim.needs in ("cpu", "cuda"):
        return "its notebook does not measure it"
    return ""


def test_each_claim_is_read_and_measured_by_the_notebook_that_it_names():
    assert {claim.id: unread(claim) for claim in load_claims() if unread(claim)} == {}


@pytest.mark.parametrize(("name", "value", "machine", "label"), [
    ("ladder-rnnt", 12.0, GPU, "evidence, not comparable"),  # the text names no baseline
    ("ten-times", None, GPU, "ill-defined"),
    ("rnnt-eval-100x", None, GPU, "not measurable here"),  # MLPerf's code is not here
    ("jasper-fp16-a100", None, GPU, "not measured yet"),
    ("ctc-greedy-batched", 1.1, GPU, "reproduced"),
    ("ctc-greedy-batched", 1.1, CPU, "not measurable here"),
    ("ctc-greedy-share", 0.15, GPU, "reproduced"),
])  # fmt: skip
def test_a_shipped_claim_is_judged_by_what_it_is_about(name, value, machine, label):
    about = CLAIMS[name]
    named = {"what": name, "metric": about.metric, "arms": about.arms}
    made = [record(value, machine=GPU, **named)] if value else []
    assert verdict(about, made, machine).label == label


def test_the_claim_of_five_times_the_batch_is_computed_from_shipped_data():
    params = CLAIMS["batch-5x"].params
    lengths = shipped_lengths("librispeech_train_clean_100")
    seconds, tokens = lengths.seconds, lengths.tokens
    known = {"D": seconds.mean(), "D2": (seconds**2).mean(), "U": tokens.mean()}
    for name in ("per_second", "per_token", "per_second2"):
        known[name] = getattr(CANARY_MEMORY, name)
    assert {name: params[name] for name in known} == pytest.approx(known, rel=1e-3)
    first = at_most_seconds(params["batch_s"], quadratic=params["quadratic"])
    share = first.share(1, seconds, tokens) / CANARY_MEMORY(1, seconds, tokens).mean()
    value = evaluate(CLAIMS["batch-5x"].formula, params)
    assert value == pytest.approx(share.mean(), rel=1e-3)


def test_headline_counts_leave_out_tautologies_and_what_is_not_about_speech():
    rows = claims_table(load_claims(), [], CPU)
    appendix = {name for name, claim in CLAIMS.items() if claim.appendix}
    main = {*CLAIMS} - appendix
    assert {row["id"] for row in listed(rows)} == main
    assert summary(rows).startswith(f"{len(main)} claims: ")
    assert summary(rows).endswith(f"; {len(appendix)} more in the appendix.")
    assert sum(answer.claims for answer in document_answers(rows)) == len(main)


def row(verdict="not measurable here", **changed):
    given = {"id": "c", "document": "000", "title": "A paper", "url": "https://x", "appendix": "", "needs": "cpu",
             "published": "2×", "tolerance": "within 10 % of 2×", "measured": "3×", "verdict": verdict, "there": "", "device": ""}  # fmt: skip
    return given | changed


@pytest.mark.parametrize(("labels", "sentence"), [
    (["reproduced", "arithmetic checked", "arithmetic checked", "too noisy", "not measured yet"],
     "Of 5 claims: 1 reproduced by measurement; 2 checked by arithmetic; 1 too noisy; 1 not measured yet."),
    (["not reproduced", "direction only"],
     "Of 2 claims: 1 confirmed in part; 1 contradicted. Confirmed in part: c (3× where 2× is published). "
     "Contradicted: c (3× where 2× is published)."),
    ([], "All of its claims are in the appendix."),
])  # fmt: skip
def test_the_answer_of_a_document_follows_from_its_verdicts(labels, sentence):
    rows = [*map(row, labels), row("reproduced", id="d", appendix="not speech")]
    (answer,) = document_answers(rows)
    assert answer.sentence == sentence
    assert (answer.title, answer.url, answer.appendix) == ("A paper", "https://x", 1)


def test_what_the_appendix_contradicts_is_named():
    rows = [row("reproduced"), row("not reproduced", id="d", appendix="not speech")]
    (answer,) = document_answers(rows)
    named = "Contradicted: d (3× where 2× is published, in the appendix)."
    assert answer.exceptions == named and answer.sentence.endswith(f" {named}")


def test_what_others_recorded_for_the_appendix_is_only_counted():
    there = {"there": "reproduced", "device": "H200"}
    rows = [row(needs="cuda", **there), row(appendix="not speech", **there)]
    elsewhere = "Recorded on H200: 1 reproduced by measurement."
    assert (
        summary(rows)
        == f"1 claim: 1 waiting for a GPU; 1 more in the appendix. {elsewhere}"
    )


@pytest.mark.parametrize("metric", ["ratio", "latency"])
def test_what_was_measured_of_an_ill_defined_claim_is_shown(metric):
    of = claim(quoted=None, metric=metric)
    found = verdict(of, [record(metric=metric)], CPU)
    assert (found.label, found.measured) == ("evidence, not comparable", 2.0)


@pytest.mark.parametrize(("change", "outcome"), [
    ({"needs": "cuda"}, "waiting for a GPU"),
    ({"needs": "cuda", "verdict": "not measured yet"}, "waiting for a GPU"),
    ({"needs": "source", "verdict": "evidence, not comparable"}, "waiting for weights, other code or a cluster"),
    ({"needs": "cluster"}, "waiting for weights, other code or a cluster"),
    ({"needs": "cuda", "tolerance": "–", "verdict": "evidence, not comparable"}, "ill-defined by the source"),
])  # fmt: skip
def test_an_open_claim_says_what_would_settle_it(change, outcome):
    counts = count_outcomes([row(**change)])
    assert tuple(counts) == OUTCOMES
    assert counts == dict.fromkeys(OUTCOMES, 0) | {outcome: 1}
