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
from asrkit.workbench.ledger import (
    LABELS,
    Claim,
    evaluate,
    grids,
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
    "001": 22,
    "002": 10,
    "003": 15,
    "004": 49,
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
    assert verdict(claim(needs="cuda"), [record()], CPU).label == "not measurable here"
    assert (
        verdict(claim(needs="cuda"), [record(machine=GPU, on_cpu=True)], GPU).label
        == "not measured yet"
    )


@pytest.mark.parametrize(("fields", "rule"), [
    ({}, "within 10% of 2×"), ({"tolerance": {"above": 0}}, "above 2×"), ({"tolerance": {"below": 0.5}}, "at least 0.5 below 2×"),
    ({"tolerance": {"abs": 0.25}}, "within 0.25 of 2×"),
])  # fmt: skip
def test_a_verdict_says_its_rule_and_keeps_the_caveats_of_its_claim(fields, rule):
    for samples in ((1.9, 2.0, 2.1), (0.7, 0.8, 0.9), (1.0, 2.0, 9.0)):  # whatever the verdict
        found = verdict(claim(notes="Only indoors.", **fields), [record(samples[1], samples)], CPU)
        assert found.why.startswith("3 repeats, quartiles ") and found.why.endswith(
            f". Reproduced means {rule}. Only indoors."
        )
    assert verdict(claim(), [record()], CPU).why.endswith("Reproduced means within 10% of 2×.")


def test_the_newest_record_of_this_machine_counts():
    old, new = record(2.0), record(1.0, (0.9, 1.0, 1.1))
    old["captured_at"], new["captured_at"] = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    assert verdict(claim(), [new, old], CPU).measured == 1.0


def test_a_claim_without_number_or_baseline_is_ill_defined():
    assert verdict(claim(arms=()), [record(arms=())], CPU).label == "ill-defined"
    assert verdict(claim(quoted=None), [record()], CPU).label == "ill-defined"
    assert verdict(claim(quoted=None, notes="Whose?"), [], CPU) == ledger.Verdict(
        label="ill-defined", why="Whose?"
    )


def test_an_ill_defined_claim_shows_what_was_recorded_for_it():
    here, there = (
        verdict(claim(quoted=None), [record(1.5)], CPU),
        verdict(claim(quoted=None), [record(machine=GPU)], CPU),
    )
    assert (here.label, here.measured, here.recorded) == ("ill-defined", 1.5, None)
    assert (there.label, there.measured, there.recorded["value"]) == ("ill-defined", None, 2.0)


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
        ledger.published.cache_clear()

    monkeypatch.setattr(grids, "shipped", lambda name: tmp_path / name)
    yield write
    ledger.published.cache_clear()


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
    assert summary(rows).startswith(f"{len(claims)} claims: ")
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
        assert (found.label, found.measured) == ("ill-defined", 12.0)
    assert verdict(claims["ten-times"], [], GPU).label == "ill-defined"


def test_what_only_a_measurement_can_settle_is_not_settled_by_a_formula_of_ours():
    (sharp,) = [claim for claim in load_claims() if claim.id == "sharp-2x"]
    assert verdict(sharp, [], GPU).label == "not measurable here"


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
        if claim.status == "planned" or (claim.formula and not path.exists()):
            continue  # said to be unmeasured, or settled by the ledger itself
        if not path.exists():
            wrong[claim.id] = "its notebook is not there, and it is not planned"
        elif not (named or listed):
            wrong[claim.id] = "its notebook does not read it"
        elif not (named or claim.formula or claim.quoted is None):
            wrong[claim.id] = "its notebook does not measure it"
    return wrong


def test_each_claim_is_read_and_measured_by_the_notebook_that_it_names():
    assert unread(load_claims(), NOTEBOOKS) == {}
    missing = {
        claim.notebook
        for claim in load_claims()
        if not (NOTEBOOKS / f"{claim.notebook}.ipynb").exists()
    }
    assert missing <= {"09_encoder_decoder", "10_mlperf_rnnt", "11_jasper"}  # that are to come
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", claim.notebook) for claim in load_claims())


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


def test_records_that_the_project_ships_are_as_they_were_sealed():
    assert records.verify([files.shipped("records")]) == []


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
