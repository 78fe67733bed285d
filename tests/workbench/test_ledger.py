"""Verdicts follow from claims and records alone, and never from another machine's."""

import copy
import csv
import hashlib
import itertools
import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from asrkit import files
from asrkit.data import CANARY_MEMORY, at_most_seconds, shipped_lengths
from asrkit.workbench import ledger, records, schemas
from asrkit.workbench.bench.suites import claims as claims_suite
from asrkit.workbench.ledger import (
    LABELS,
    LEGEND,
    Claim,
    computed,
    count_verdicts,
    document_answers,
    evaluate,
    grids,
    headline,
    load,
    load_claims,
    summary,
    table,
    verdict,
)
from asrkit.workbench.records import Measurement

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
FINDINGS = {  # what arithmetic on published figures does not give; everything else that has a formula holds
    "unet-9.7x": "not reproduced",  # 9.55 by the same text's table
    "batch-5x": "direction only",  # an estimate, with lengths and memory that are at hand
}
COUNTS = {
    "000": 16,
    "001": 25,
    "002": 11,
    "003": 15,
    "004": 50,
}  # claims of each document: none goes unnoticed
SOURCE = {"document": "000", "title": "A paper", "url": "a blog", "section": "2"}
CPU, GPU = {"id": "cpu", "gpus": []}, {"id": "gpu", "gpus": [{"name": "H200"}]}


def claim(**fields):
    given = {"id": "c", "text": "Twice as fast.", "source": SOURCE, "kind": "ratio", "metric": "ratio", "unit": "1", "quoted": 2.0,
             "notebook": "00", "arms": ("slow", "fast")}  # fmt: skip
    return Claim(**given | fields)


def record(
    value=2.0, samples=(1.9, 2.0, 2.1), machine=CPU, arms=("slow", "fast"), on_cpu=False, **fields
):
    made = Measurement(
        **{
            "what": "c",
            "metric": "ratio",
            "unit": "1",
            "value": value,
            "samples": samples,
            "params": {"arms": list(arms)},
        }
        | fields
    )
    sealed = copy.deepcopy(made.record())
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
    for other in (
        record(arms=("slow", "else")),
        record(what="d"),
        record(metric="latency"),
        record(origin="derived"),
    ):
        assert verdict(claim(), [other], CPU).label == "not measured yet"


def test_what_another_machine_recorded_is_shown_but_decides_nothing():
    found = verdict(claim(), [record(machine=GPU)], CPU)
    assert (found.label, found.measured) == ("not measured yet", None)
    assert found.recorded["machine"]["id"] == "gpu"
    needs_gpu = verdict(claim(needs="cuda"), [record(machine=GPU)], CPU)
    assert (needs_gpu.label, needs_gpu.measured) == ("not measurable here", None)
    assert verdict(claim(needs="cuda"), [record(machine=GPU)], GPU).label == "reproduced"


def test_a_cpu_record_never_answers_a_claim_about_a_gpu():
    for made, machine in ((record(), CPU), (record(machine=GPU, on_cpu=True), GPU)):
        found = verdict(claim(needs="cuda"), [made], machine)
        assert (found.label, found.measured) == ("evidence, not comparable", 2.0)
        (beside,) = found.evidence
        assert beside.record is made and beside.is_here
        assert "measured on a CPU, and the claim is about a GPU" in found.why


@pytest.mark.parametrize(("fields", "rule"), [
    ({}, "within 10 % of 2×"), ({"tolerance": {"above": 0}}, "above 2×"), ({"tolerance": {"below": 0.5}}, "at least 0.5 below 2×"),
    ({"tolerance": {"abs": 0.25}}, "within 0.25 of 2×"), ({"least": {"cores": 8}}, "within 10 % of 2× with at least 8 cores"),
])  # fmt: skip
def test_a_verdict_says_its_rule_and_keeps_the_caveats_of_its_claim(fields, rule):
    for samples in ((1.9, 2.0, 2.1), (0.7, 0.8, 0.9), (1.0, 2.0, 9.0)):  # whatever the verdict
        found = verdict(claim(notes="Only indoors.", **fields), [record(samples[1], samples)], CPU)
        assert found.why.startswith("3 repeats, quartiles ") and found.why.endswith(
            f". Reproduced means {rule}. Only indoors."
        )
    assert verdict(claim(), [record()], CPU).why.endswith("Reproduced means within 10 % of 2×.")


def test_the_newest_record_of_this_machine_counts():
    old, new = record(2.0), record(1.0, (0.9, 1.0, 1.1))
    old["captured_at"], new["captured_at"] = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    assert verdict(claim(), [new, old], CPU).measured == 1.0


def test_a_claim_without_number_or_baseline_is_ill_defined():
    assert verdict(claim(arms=()), [], CPU).label == "ill-defined"
    assert verdict(claim(quoted=None, notes="Whose?"), [], CPU) == ledger.Verdict(
        label="ill-defined", why="Whose?"
    )


def test_what_was_measured_for_an_ill_defined_claim_is_shown_and_settles_nothing():
    for vague in (claim(quoted=None), claim(arms=())):
        arms = vague.arms
        here = verdict(vague, [record(1.5, arms=arms)], CPU)
        there = verdict(vague, [record(machine=GPU, arms=arms)], CPU)
        assert (here.label, here.measured, here.recorded) == ("evidence, not comparable", 1.5, None)
        assert (there.label, there.measured) == ("evidence, not comparable", None)
        assert there.recorded["value"] == 2.0
        assert "no number and baseline to compare with" in here.why


def test_records_of_other_names_are_shown_beside_a_claim_that_names_them():
    named = [{"what": "alike", "arms": ["slow", "ours"], "impl": "x", "why": "another loop"}]
    with_evidence = claim(needs="cuda", evidence=named)
    alike = record(2.4, (2.4,) * 3, what="alike", arms=("slow", "ours"), impl="x")
    for other in ({"impl": "y"}, {"arms": ("slow", "fast")}, {"metric": "latency"}):
        made = record(
            2.4, (2.4,) * 3, **{"what": "alike", "arms": ("slow", "ours"), "impl": "x"} | other
        )
        assert verdict(with_evidence, [made], CPU).label == "not measurable here"
    found = verdict(with_evidence, [alike], CPU)
    assert (found.label, found.measured) == ("evidence, not comparable", 2.4)
    assert "2.4× (slow over ours)" in found.why and "another loop" in found.why
    decided = verdict(with_evidence, [alike, record(machine=GPU)], GPU)
    assert (decided.label, decided.measured) == ("reproduced", 2.0)
    assert [one.is_here for one in decided.evidence] == [False]
    comparable_elsewhere = verdict(with_evidence, [alike, record(machine=GPU)], CPU)
    assert comparable_elsewhere.label == "not measurable here"


def test_the_shipped_records_give_evidence_for_claims_about_other_hardware():
    shipped = records.read(files.shipped("records"))
    claims = {claim.id: claim for claim in load_claims()}
    elsewhere = {"id": "none of those", "gpus": []}
    for name in ("label-looping-2x", "label-looping-faster", "cpu-rtfx-parakeet", "ten-times"):
        found = verdict(claims[name], shipped, elsewhere)
        assert found.label == "evidence, not comparable", name
        assert claims[name].show(found.recorded["value"]) in found.why
        assert found.evidence, name
    on_a_core = verdict(claims["cpu-rtfx-parakeet"], shipped, elsewhere)
    assert [one.record["impl"] for one in on_a_core.evidence] == ["float32", "packed_bfloat16"]
    assert on_a_core.recorded["impl"] == "float32"


def test_an_estimate_is_shown_beside_a_claim_and_never_decides_it():
    named = [{"what": "best", "why": "an estimate"}]
    with_evidence = claim(evidence=named)
    estimate = record(2.0, (2.0,) * 3, what="best", arms=(), origin="estimated")
    found = verdict(with_evidence, [estimate], CPU)
    assert (found.label, found.measured) == ("evidence, not comparable", 2.0)
    computed = record(2.0, (2.0,) * 3, what="best", arms=(), origin="computed")
    assert verdict(with_evidence, [computed], CPU).measured is None
    its_own = record(2.0, (2.0,) * 3, origin="estimated")
    assert verdict(with_evidence, [its_own], CPU).label == "not measured yet"


def test_the_core_at_its_best_is_what_this_machine_measured_of_the_published_core():
    (claimed,) = [one for one in load_claims() if one.id == "cpu-rtfx-parakeet"]
    options = {"arms": (), "metric": "rtfx", "unit": "s/s", "origin": "estimated"}
    best = record(20.0, (20.0,) * 3, what="core-at-its-best", impl="optimized_int8", **options)
    found = verdict(claimed, [*records.read(files.shipped("records")), best], CPU)
    assert (found.label, found.measured) == ("evidence, not comparable", 20.0)
    assert "20× real time (optimized_int8)" in found.why
    assert found.recorded["what"] == "recogniser-one-core"


@pytest.mark.parametrize("impl", ["optimized_bfloat16", "optimized_int8"])
def test_the_arms_of_one_core_stand_beside_the_published_one(impl):
    (claimed,) = [one for one in load_claims() if one.id == "cpu-rtfx-parakeet"]
    options = {"arms": (), "metric": "rtfx", "unit": "s/s", "impl": impl}
    timed = record(15.0, (15.0,) * 3, what="recogniser-one-core", **options)
    assert verdict(claimed, [timed], CPU).measured == 15.0


def test_a_record_of_toy_sizes_is_no_evidence():
    for quick, label in ((True, "not measured yet"), (False, "reproduced")):
        made = record()
        made["params"]["quick"] = quick
        assert verdict(claim(), [made], CPU).label == label


@pytest.mark.parametrize(("cores", "value", "label"), [
    (8, 1.0, "reproduced"), (7, 1.0, "direction only"), (2, 0.98, "direction only"), (None, 1.0, "direction only"),
    (2, 0.6, "not reproduced"), (64, 0.6, "not reproduced"),
])  # fmt: skip
def test_a_few_cores_confirm_only_the_direction_of_a_claim_about_many(cores, value, label):
    (scaling,) = [claim for claim in load_claims() if claim.id == "cpu-linear-scaling"]
    made = record(value, (value,) * 3, what=scaling.id, arms=scaling.arms)
    made["params"] |= {"cores": cores} if cores else {}
    found = verdict(scaling, [made], CPU)
    assert found.label == label and ("fewer than 8" in found.why.partition("Reproduced")[0]) == (
        cores in (None, 2, 7)
    )


@pytest.mark.parametrize(
    ("quoted", "label"), [(1.6, "arithmetic checked"), (2.5, "not reproduced")]
)
def test_arithmetic_is_computed_not_believed(quoted, label):
    arithmetic = claim(
        kind="arithmetic",
        arms=(),
        formula="a * b / 10 ** 3",
        params={"a": 40, "b": 41},
        quoted=quoted,
    )
    found = verdict(arithmetic, [], CPU)
    assert (found.label, found.measured) == (label, 1.64)


@pytest.mark.parametrize(
    "formula", ["__import__('os')", "a.real", "a if a else 1", "b + 1", "f(a)", "[a]"]
)
def test_a_formula_is_arithmetic_and_nothing_else(formula):
    with pytest.raises(ValueError, match="formula: expected numbers"):
        evaluate(formula, {"a": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "unknown field surprise"), ({"text": None}, "missing field text"), ({"kind": "guess"}, "kind must be one of"),
        ({"source": {"title": "x"}}, "missing field source.document"), ({"quoted": "two"}, "quoted must be number or null"),
        ({"quoted": float("inf")}, "a finite number or null"), ({"text": 5}, "text must be string, got 5"), ({"id": ["c"]}, "id must be string"),
        ({"params": [1], "formula": "1"}, "params must be object"), ({"tolerance": 3}, "tolerance must be object"), ({"formula": "9**9**9"}, ""), ({"formula": "10**10**7"}, ""),
        ({"formula": "1/0"}, "division"), ({"formula": "2*"}, "invalid syntax"), ({"formula": "(-8)**0.5"}, "a finite number"),
        ({"formula": "max(1)"}, "not iterable"), ({"formula": "1e308 * 10"}, "formula: expected a finite number"),
        ({"kind": "latency", "arms": [], "formula": "1"}, "a formula"), ({"kind": "arithmetic", "arms": []}, "a formula"),
        ({"arms": ["one"]}, "two arms or none"), ({"tolerance": {"rel": 1, "abs": 1}}, "tolerance must contain less than or equal to 1"),
        ({"needs": "luck"}, "needs must be one of"), ({"formula": "1", "status": "planned"}, "no status planned"),
        ({"grid": "jasper_seeds.csv"}, "a grid with"), ({"keys": ["set"]}, "a grid with"), ({"take": "mean"}, "take must be one of"),
    ],
)  # fmt: skip
def test_a_claim_that_breaks_the_schema_is_named(tmp_path, change, message):
    entry = {"id": "c", "text": "t", "source": SOURCE, "kind": "ratio", "metric": "ratio", "unit": "1", "quoted": 2.0,
             "notebook": "00", "arms": ["a", "b"]} | change  # fmt: skip
    entry = {key: value for key, value in entry.items() if value is not None}
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([entry]))
    with pytest.raises(ValueError, match=f"claim .*'c'.*: .*{message}"):
        load_claims(path)


@pytest.mark.parametrize("text, message", [
    ("- a\n- b", "claim 'a': value must be object"), ("a: 1", "claims.yaml: expected a list"), ("hello", "expected a list"),
    ("- {a: [1", "claims.yaml: expected YAML"), (b"- id: \xff\xfe", "claims.yaml: expected YAML"), ("- {id: c, {a: 1}: 2}", "YAML"),
])  # fmt: skip
def test_a_file_that_holds_no_claims_is_named(tmp_path, text, message):
    (tmp_path / "claims.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        load_claims(tmp_path / "claims.yaml")


@pytest.mark.parametrize("table, fields, message", [
    ("gpu,batch,half,ms,printed\nA,1,0,x,1\n", {}, "unsupported operand"), ("gpu,batch,half,ms\nA,1,0,1,9\n", {}, "more in line"),
    ("gpu,batch,half,ms,printed\nA,1,0,3,1\n", {"where": {"gpu": "B"}, "quoted": 0}, "where: expected lines of the grid"),
    ("gpu,batch,half,ms,printed\nA,1,0,nan,1\n", {}, "formula: expected a finite number"),
])  # fmt: skip
def test_a_grid_that_cannot_be_computed_is_told_with_its_claim(
    tmp_path, grid, table, fields, message
):
    grid(table)
    entry = (
        {"id": "c", "text": "t", "source": SOURCE, "notebook": "00"}
        | SPEEDUP
        | {"arms": [], "keys": [*SPEEDUP["keys"]]}
        | fields
    )
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump([entry]))
    with pytest.raises(ValueError, match=f"claim 'c': .*{message}"):
        load_claims(tmp_path / "claims.yaml")


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


def test_what_needs_many_gpus_is_not_measurable_on_any_machine():
    assert verdict(claim(needs="cluster"), [], GPU).label == "not measurable here"


def test_a_ratio_that_is_estimated_and_far_off_confirms_its_direction_at_most():
    estimate = claim(arms=(), formula="a / b", params={"a": 15, "b": 2}, quoted=5)
    assert [
        verdict(estimate, [], CPU).label,
        verdict(claim(arms=(), formula="1 / 2"), [], CPU).label,
    ] == [
        "direction only",
        "not reproduced",
    ]


SPEEDUP = {"kind": "arithmetic", "metric": "lines", "unit": "lines", "quoted": 2, "arms": (), "grid": "table.csv",
           "keys": ("gpu", "batch", "half"),
           "base": {"half": 0}, "formula": "base_ms / ms", "column": "printed", "tolerance": {"abs": 0.0055}}  # fmt: skip


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Writes published/table.csv, where the ledger looks for it, and forgets what was read before."""

    def write(text, name="table.csv"):
        (tmp_path / "published").mkdir(exist_ok=True)
        (tmp_path / "published" / name).write_text(text)
        forget()

    def forget():
        ledger.published.cache_clear()
        computed.verdict_by_formula.cache_clear()

    monkeypatch.setattr(grids, "shipped", lambda name: tmp_path / name)
    yield write
    forget()


def test_a_grid_is_computed_line_by_line_and_what_is_off_is_named(grid):
    lines = "gpu,batch,half,ms,printed\nA,1,0,30,\nA,1,1,20,1.50\nB,8,0,90,\nB,8,1,20,{}\n"
    grid(lines.format("4.50"))
    assert verdict(claim(**SPEEDUP), [], CPU).label == "arithmetic checked"
    grid(lines.format("4.40"))
    found = verdict(claim(**SPEEDUP), [], CPU)
    assert (found.label, found.measured) == ("not reproduced", 1)
    assert "1 of 2 lines agree; not B, batch 8, half 1: 4.5 where 4.4 is printed." in found.why


def test_a_line_that_is_missing_from_a_grid_or_named_twice_is_told(grid):
    grid("gpu,batch,half,ms,printed\nA,1,0,30,\nA,1,1,20,1.50\n")
    assert (
        verdict(claim(**SPEEDUP), [], CPU).label == "not reproduced"
    )  # one line where two are claimed
    grid("gpu,batch,half,ms,printed\nA,1,0,30,\nA,1,0,31,\nA,1,1,20,1.50\n")
    with pytest.raises(ValueError, match="expected keys that name a line, got 2"):
        verdict(claim(**SPEEDUP), [], CPU)


def test_a_grid_can_be_asked_for_its_largest_value_or_whether_lines_hold(grid):
    grid("gpu,batch,half,ms,printed\nA,1,0,30,\nA,1,1,20,1.50\nB,8,0,90,\nB,8,1,20,4.50\n")
    largest = claim(
        **SPEEDUP
        | {
            "take": "max",
            "column": "",
            "metric": "ratio",
            "unit": "1",
            "quoted": 4.5,
            "where": {"half": 1},
        }
    )
    assert (verdict(largest, [], CPU).label, verdict(largest, [], CPU).measured) == (
        "arithmetic checked",
        4.5,
    )
    assert "the max of 2 lines is at B, batch 8, half 1" in verdict(largest, [], CPU).why
    ordered = claim(**SPEEDUP | {"column": "", "base": {}, "formula": "20 <= ms < 90", "quoted": 4})
    assert (
        verdict(ordered, [], CPU).measured == 3
        and "not B, batch 8, half 0." in verdict(ordered, [], CPU).why
    )


@pytest.mark.parametrize(
    ("formula", "value"),
    [("mean(a, 4)", 3), ("max(a, 7) - min(a, 7)", 5), ("pstdev(a, 4)", 1), ("1 < a <= 2", True)],
)
def test_a_formula_may_ask_for_means_extremes_and_order(formula, value):
    assert evaluate(formula, {"a": 2}) == value


def test_the_shipped_ledger_holds_and_its_arithmetic_is_right():
    claims = load_claims()
    rows = table(claims, [])
    assert {row["verdict"] for row in rows} <= set(LABELS)
    computed = {
        claim.id: row["verdict"] for claim, row in zip(claims, rows, strict=True) if claim.formula
    }
    assert {
        name: label for name, label in computed.items() if label != "arithmetic checked"
    } == FINDINGS
    documents = Counter(row["document"] for row in rows if row["document"].startswith("00"))
    assert documents == COUNTS


def test_the_schema_of_claims_names_the_fields_of_a_claim():
    required = {item.name for item in fields(Claim) if item.default is item.default_factory}
    assert {*schemas.CLAIM["properties"]} == {item.name for item in fields(Claim)}
    assert {*schemas.CLAIM["required"]} == required


def test_a_ratio_over_a_baseline_that_nobody_named_has_a_value_and_no_verdict():
    claims = {claim.id: claim for claim in load_claims()}
    for name in ("ladder-rnnt", "ladder-tdt"):
        found = verdict(
            claims[name],
            [record(12.0, (12.0,) * 3, machine=GPU, what=name, arms=claims[name].arms)],
            GPU,
        )
        assert (found.label, found.measured) == ("evidence, not comparable", 12.0)
    assert verdict(claims["ten-times"], [], GPU).label == "ill-defined"


def test_what_only_a_measurement_can_settle_is_not_settled_by_a_formula_of_ours():
    (sharp,) = [claim for claim in load_claims() if claim.id == "sharp-2x"]
    assert verdict(sharp, [], GPU).label == "planned"


def test_the_share_of_decoding_that_the_suite_records_answers_its_claim():
    (share,) = [claim for claim in load_claims() if claim.id == "ctc-greedy-share"]
    times = share.params["decode_ms"], share.params["decode_ms"] + share.params["model_ms"]
    assert (
        share.quoted == pytest.approx(times[0] / times[1], abs=5e-4) and share.status == "measured"
    )
    made = record(0.15, (0.15,) * 3, machine=GPU, what=share.id, metric="share", arms=())
    assert verdict(share, [made], GPU).label == "reproduced"


@pytest.mark.parametrize(
    "tabled",
    [claim for claim in load_claims() if claim.grid and not claim.take],
    ids=lambda claim: claim.id,
)
def test_a_digit_that_is_changed_in_a_published_table_turns_its_claim_red(grid, tabled):
    text = files.shipped(f"published/{tabled.grid}").read_text()
    grid(text, tabled.grid)
    assert verdict(tabled, [], CPU).label == "arithmetic checked"
    head, *body = [line.split(",") for line in text.splitlines()]
    for line, column in itertools.product(range(len(body)), range(len(head))):
        cell = body[line][column]
        if re.fullmatch(r"[\d.]+", cell) and head[column] not in tabled.keys:
            other = copy.deepcopy(body)
            other[line][column] = ("9" if cell[0] < "5" else "1") + cell[1:]
            grid("\n".join(map(",".join, [head, *other])) + "\n", tabled.grid)
            if verdict(tabled, [], CPU).label == "not reproduced":
                return
    pytest.fail("no first digit matters")


def test_every_published_table_is_as_it_was_read_and_its_source_is_told():
    folder = files.shipped("published")
    told = (folder / "README.md").read_text()
    digests = dict(
        reversed(line.split()) for line in re.findall(r"^ {4}[0-9a-f]{16} \S+$", told, re.MULTILINE)
    )
    assert digests == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in folder.glob("*.csv")
    }
    assert all(f"| `{name}` | " in told for name in digests)
    assert {claim.grid for claim in load_claims()} - {""} <= {*digests}


TWICE = {  # claims that quote one cell of a published table
    "jasper-wer-a100": (
        "jasper_accuracy",
        "wer_percent",
        {"system": "DGX A100", "set": "test-clean"},
    ),
    "jasper-wer-v100": (
        "jasper_accuracy",
        "wer_percent",
        {"system": "DGX-1 32GB", "set": "test-clean"},
    ),
    "jasper-time-a100": (
        "jasper_accuracy",
        "train_hours",
        {"system": "DGX A100", "set": "dev-clean"},
    ),
    "jasper-time-v100": (
        "jasper_accuracy",
        "train_hours",
        {"system": "DGX-1 32GB", "set": "dev-clean"},
    ),
    "jasper-throughput-a100": (
        "jasper_training",
        "sequences_per_s",
        {"system": "DGX A100", "batch": 64, "gpus": 1, "precision": "mixed"},
    ),
    "jasper-mixed-a100": (
        "jasper_training",
        "speedup",
        {"system": "DGX A100", "batch": 64, "gpus": 1, "precision": "mixed"},
    ),
    "jasper-scaling-8": (
        "jasper_training",
        "weak_scaling",
        {"system": "DGX A100", "batch": 64, "gpus": 8, "precision": "mixed"},
    ),
    "jasper-latency-a100": (
        "jasper_inference",
        "avg_ms",
        {"system": "DGX A100", "batch": 16, "duration_s": 16.7, "precision": "FP16"},
    ),
    "jasper-fp16-a100": (
        "jasper_inference",
        "speedup",
        {"system": "DGX A100", "batch": 16, "duration_s": 16.7, "precision": "FP16"},
    ),
    "jasper-fp16-fp32": (
        "jasper_inference",
        "speedup",
        {"system": "DGX-1 32GB", "batch": 16, "duration_s": 16.7, "precision": "FP16"},
    ),
    "rnnt-2.75-min": ("mlperf_v1_0", "max_scale_min", {"workload": "RNN-T"}),
    "rnnt-309-min": ("mlperf_v1_0", "per_accelerator_min", {"workload": "RNN-T"}),
}


def test_a_cell_of_a_table_that_a_claim_quotes_is_the_same_in_both():
    quoted = {claim.id: claim.quoted for claim in load_claims()}
    for name, (of, column, where) in TWICE.items():
        (line,) = [line for line in ledger.published(f"{of}.csv") if where.items() <= line.items()]
        assert quoted[name] == line[column], name


IN_SUITE = {name for studies in claims_suite.STUDIES.values() for ids in studies for name in ids}
TO_COME = set()  # notebooks


def unread(claims, folder):
    """Of each claim whose notebook neither reads nor measures it: why."""
    wrong = {}
    for claim in claims:
        path = folder / f"{claim.notebook}.ipynb"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        named, listed = (
            f'"{claim.id}"' in code,
            "load_claims" in code and f'"{claim.notebook}"' in code,
        )
        is_measured = named or claim.id in IN_SUITE
        if claim.status == "planned" or (claim.formula and not path.exists()):
            continue  # said to be unmeasured, or settled by the ledger itself
        if not path.exists():
            wrong[claim.id] = "its notebook is not there, and it is not planned"
        elif not (named or listed):
            wrong[claim.id] = "its notebook does not read it"
        elif claim.needs == "cluster":
            continue  # which no notebook can measure
        elif not (is_measured or claim.formula or claim.quoted is None):
            wrong[claim.id] = "its notebook does not measure it"
    return wrong


def test_each_claim_is_read_and_measured_by_the_notebook_that_it_names():
    assert unread(load_claims(), NOTEBOOKS) == {}
    missing = {
        claim.notebook
        for claim in load_claims()
        if not (NOTEBOOKS / f"{claim.notebook}.ipynb").exists()
    }
    assert missing <= TO_COME
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", claim.notebook) for claim in load_claims())


def test_what_no_notebook_measures_is_planned_in_one_count():
    for claim in load_claims():
        found = verdict(claim, [], GPU).label
        if claim.notebook in TO_COME and not claim.formula:
            assert found in ("planned", "ill-defined"), claim.id
        if found == "planned":
            assert claim.status == "planned" and claim.id not in IN_SUITE, claim.id


@pytest.mark.parametrize(("fields", "why"), [
    ({"id": "joint-packing", "notebook": "09_nowhere"}, "not there"),
    ({"id": "joint-packing", "notebook": "01_transducer"}, "does not read"),
    ({"id": "d", "notebook": "02_joint_memory"}, "does not measure"),
    ({"id": "joint-packing", "notebook": "02_joint_memory"}, None),
    ({"id": "d", "notebook": "09_nowhere", "status": "planned"}, None),
    ({"id": "d", "notebook": "09_nowhere", "kind": "arithmetic", "arms": (), "formula": "1"}, None),
])  # fmt: skip
def test_a_claim_whose_notebook_never_measures_it_is_found(fields, why):
    assert [text for text in unread([claim(**fields)], NOTEBOOKS).values() if why not in text] == []
    assert bool(unread([claim(**fields)], NOTEBOOKS)) == bool(why)


def test_sources_are_well_formed():
    for source in {tuple(sorted(claim.source.items())) for claim in load_claims()}:
        told = dict(source)
        assert re.fullmatch(r"00[0-4]|arXiv \d{4}\.\d{5}|secondary", told["document"]), told
        assert re.fullmatch(r"https://[a-z0-9.]+\.[a-z]+/\S+", told["url"]), told
        assert (
            not told["document"].startswith("arXiv")
            or told["document"].split()[1] in told["url"] + told["title"]
        ), told


@pytest.mark.filterwarnings("error")
def test_every_line_of_the_records_that_the_project_ships_is_a_record():
    assert records.read(files.shipped("records"))


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
    means = {
        "D": lengths.seconds.mean(),
        "D2": (lengths.seconds**2).mean(),
        "U": lengths.tokens.mean(),
    }
    memory = {
        name: getattr(CANARY_MEMORY, name) for name in ("per_second", "per_token", "per_second2")
    }
    assert {name: claim.params[name] for name in {**means, **memory}} == pytest.approx(
        {**means, **memory}, rel=1e-3
    )
    first = at_most_seconds(claim.params["batch_s"], quadratic=claim.params["quadratic"])
    shares = (
        first.share(1, lengths.seconds, lengths.tokens).mean(),
        CANARY_MEMORY(1, lengths.seconds, lengths.tokens).mean(),
    )
    assert evaluate(claim.formula, claim.params) == pytest.approx(shares[0] / shares[1], rel=1e-3)


def test_every_published_run_stands_once_and_names_its_file_and_how_it_ended():
    folder = files.shipped("published")
    runs = list(csv.DictReader((folder / "mlperf_rnnt_runs.csv").read_text().splitlines()))
    assert len({(run["round"], run["file"]) for run in runs}) == len(runs) > 0
    assert all(run["file"].startswith("NVIDIA/results/") and int(run["epochs"]) > 0 for run in runs)
    assert {run["status"] for run in runs} == {"success", "aborted"}
    assert f"| {len(runs)} training runs" in (folder / "README.md").read_text()


def test_the_tolerance_stands_in_each_row_and_in_the_reason():
    rows = {row["id"]: row for row in table(load_claims(), [], CPU)}
    assert rows["frames-after-8x"]["tolerance"] == "within 10 % of 200 frames"
    assert "212.5 frames, within 10 % of 200 frames" in rows["frames-after-8x"]["why"]
    assert rows["frames-after-8x"]["measured"] == "212.5 frames (computed)"
    assert rows["cpu-linear-scaling"]["tolerance"] == "within 10 % of 1× with at least 8 cores"
    assert rows["unet-9.7x"]["tolerance"] == "above 9.7×"
    assert "9.546×, not above 9.7×" in rows["unet-9.7x"]["why"]
    assert rows["jasper-seeds-mean"]["tolerance"] == "each line within 0.0055 of its cell"
    assert rows["jasper-latency-ordered"]["tolerance"] == "true in each line"
    for claim in load_claims():
        assert (rows[claim.id]["tolerance"] == "–") == (not claim.is_defined), claim.id


def test_headline_counts_leave_out_tautologies_and_what_is_not_about_speech():
    claims = load_claims()
    rows = table(claims, [], CPU)
    appendix = {claim.id for claim in claims if claim.appendix}
    assert {"mlperf-16-records", "frames-per-second-100", "ssd-8-faster", "unet-9.7x"} <= appendix
    assert not {"joint-memory-20s", "ten-times", "rnnt-eval-100x", "jasper-seeds-mean"} & appendix
    main = headline(rows)
    assert {row["id"] for row in main} == {claim.id for claim in claims} - appendix
    assert sum(count_verdicts(main).values()) == len(claims) - len(appendix) < len(claims)
    assert summary(rows).startswith(f"{len(main)} claims: ")
    assert summary(rows).endswith(f"; {len(appendix)} more in the appendix.")
    for answer in document_answers(rows):
        of_document = [claim for claim in claims if claim.source["document"] == answer.document]
        assert answer.claims == sum(not claim.appendix for claim in of_document)
        assert answer.appendix == sum(bool(claim.appendix) for claim in of_document)
        assert sum(answer.counts.values()) == answer.claims


def row(verdict, **fields):
    given = {"id": "c", "document": "000", "title": "A paper", "url": "https://x", "appendix": "",
             "published": "2×", "measured": "3×", "verdict": verdict}  # fmt: skip
    return given | fields


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (["reproduced"], "Of 1 claim: 1 reproduced. The one that could be tested agrees. Our view: what could be tested holds."),
        (["arithmetic checked", "arithmetic checked", "planned"],
         "Of 3 claims: 2 arithmetic checked; 1 planned. The 2 that could be tested agree. "
         "Open: 1 waits for a measurement that is still to be written. "
         "Our view: its arithmetic is right, and none of its measurements is confirmed here."),
        (["reproduced", "not reproduced", "direction only"],
         "Of 3 claims: 1 reproduced; 1 direction only; 1 not reproduced. Of 3 that could be tested, 1 agrees, "
         "1 agrees in part (c: 3× where 2× is published), 1 does not (c: 3× where 2× is published). "
         "Our view: what could be tested holds, except as noted."),
        (["not reproduced"], "Of 1 claim: 1 not reproduced. Of 1 that could be tested, 1 does not (c: 3× where 2× is published). "
         "Our view: do not rely on its figures without measuring."),
        (["ill-defined", "ill-defined", "evidence, not comparable"],
         "Of 3 claims: 1 evidence, not comparable; 2 ill-defined. None of them could be tested here. "
         "Open: 2 give no number or no baseline; 1 could be measured under other conditions only. "
         "Our view: it states too little, or conditions too far from ours, to be tested."),
    ],
)  # fmt: skip
def test_the_answer_of_a_document_follows_from_its_verdicts(labels, sentence):
    rows = [row(label) for label in labels]
    (answer,) = document_answers([*rows, row("reproduced", id="d", appendix="not speech")])
    assert answer.sentence == sentence
    assert (answer.title, answer.url, answer.appendix) == ("A paper", "https://x", 1)
    (answer,) = document_answers([*rows, row("not reproduced", id="d", appendix="not speech")])
    assert answer.sentence.startswith(sentence)
    assert answer.sentence.endswith(
        "In the appendix, 1 does not agree (d: 3× where 2× is published)."
    )


def test_every_verdict_changes_the_answer_of_its_document():
    sentences = {label: document_answers([row(label)])[0].sentence for label in LABELS}
    assert len(set(sentences.values())) == len(LABELS)
    assert all(f"1 {label}" in sentence for label, sentence in sentences.items())


def test_the_legend_says_what_a_part_agreement_is():
    scaling = next(claim for claim in load_claims() if claim.id == "cpu-linear-scaling")
    made = record(0.9965, (0.9965,) * 3, what=scaling.id, arms=scaling.arms)
    made["params"]["cores"] = 2
    found = verdict(scaling, [made], CPU)
    assert found.label == "direction only" and scaling.agrees(found.measured)
    assert "within the tolerance, but was measured at a smaller scale" in LEGEND[found.label]
    assert tuple(LEGEND) == LABELS


def test_a_formula_is_computed_once_however_often_the_ledger_is_asked(monkeypatch):
    computed.verdict_by_formula.cache_clear()
    load._shipped_claims.cache_clear()
    evaluated = Counter()
    plain = computed.evaluate

    def counted(formula, params):
        evaluated[formula, str(params)] += 1
        return plain(formula, params)

    monkeypatch.setattr(computed, "evaluate", counted)
    for _ in range(2):
        table(load_claims(), [], CPU)
    assert evaluated and computed.verdict_by_formula.cache_info().misses == sum(
        bool(claim.formula) for claim in load_claims()
    )


def test_each_claim_is_told_apart_from_every_other_and_names_its_subject():
    texts = [claim.text for claim in load_claims()]
    assert len(set(texts)) == len(texts)
    for claim in load_claims():
        first = claim.text.split()[0]
        assert first not in {"So", "That", "It", "This", "They", "Or", "These", "Its", "Then"}, (
            claim.id
        )
        assert claim.text.endswith("."), claim.id
        assert "for that batch" not in claim.text.lower() and "the same" not in claim.text[:12], (
            claim.id
        )


def test_the_guide_counts_the_claims_as_the_ledger_does():
    rows = table(load_claims(), [], CPU)
    main = len(headline(rows))
    guide = (NOTEBOOKS.parent / "docs/report.md").read_text(encoding="utf-8")
    assert f"{main} claims of five documents" in guide
    assert f"; {len(rows) - main} more in an appendix" in guide
    assert {row["document"] for row in rows} >= {"000", "001", "002", "003", "004"}
