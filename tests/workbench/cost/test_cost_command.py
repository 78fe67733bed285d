"""`asrkit cost`: the table and the JSON say the same, and nonsense is one line."""

import itertools
import json
import re

import pytest

from asrkit.cli import main
from asrkit.workbench import cost, records
from asrkit.workbench.cost import Range


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys, *arguments):
    """The lines of text of `asrkit cost`, and what it says with --json."""
    assert main(["cost", *arguments]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert main(["cost", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return text.splitlines(), json.loads(out)


def cells(lines, heading="#  instance"):
    """The cells of the table whose header begins so, by its columns, until a line that is none."""
    first = next(number for number, line in enumerate(lines) if line.startswith(heading))
    table = list(itertools.takewhile(lambda line: line and line[:4] != "RTFx", lines[first:]))
    starts = [match.start() for match in re.finditer(r"(?:^|(?<=  ))\S", table[0])]
    return [
        [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for line in table
    ]


def test_the_table_and_the_json_agree(capsys):
    lines, told = run(capsys)
    head, *rows = cells(lines)
    assert head == ["#", "instance", "units", "RTFx of one", "batch", "USD/1M hours", "kWh"]
    assert len(rows) == len(told["rows"]) >= 4
    source_head, *sources = cells(lines, "#  model")
    assert source_head == ["#", "model", "RTFx is from"]
    even_head, *break_even = cells(lines, "instance")
    assert even_head == ["instance", "costs as much as", "at an RTFx of"]
    for number, (row, source, data) in enumerate(zip(rows, sources, told["rows"], strict=True), 1):
        ends = [data[name] for name in ("rtfx", "usd_per_million_hours", "kWh")]
        assert row[:2] == [str(number), data["instance"]] and row[4] == str(data["batch"])
        assert row[2].startswith(f"{data['units']} {data['per']}")
        assert [row[3], *row[5:]] == [str(Range(*one)) if one else "–" for one in ends]
        assert source[:2] == [str(number), data["model"]] and data["source"]
        assert source[2].startswith(data["origin"]) and data["device"] in source[2]
        assert bool(data["against"]) == bool(data["break_even_rtfx"])
        if data["against"]:
            even = [data["instance"], data["against"], str(Range(*data["break_even_rtfx"]))]
            assert break_even.count(even) == 1
    assert len(break_even) >= 2
    end = next(number for number, line in enumerate(lines) if "the cheapest on cores" in line)
    assert max(map(len, lines[:end])) <= 100
    assert {data["per"] for data in told["rows"]} == {"core", "gpu"} and {"published"} < {
        data["origin"] for data in told["rows"]
    }
    assert (
        f"{told['model']}: the cheapest on cores costs {Range(*told['cores_over_gpus'])} times"
        in "\n".join(lines)
    )


def test_the_ratio_is_of_one_model_and_says_what_else_differs(capsys):
    lines, told = run(capsys)
    dearest_gpu = max(
        row["usd"][1]
        for row in told["rows"]
        if row["per"] == "gpu" and row["model"] == told["model"]
    )
    cheapest = [
        min(
            row["usd"][1]
            for row in told["rows"]
            if row["per"] == per and row["model"] == told["model"]
        )
        for per in ("core", "gpu")
    ]
    assert told["model"] == "parakeet_rnnt_1_1b" and cheapest[1] < dearest_gpu
    assert told["cores_over_gpus"][1] == pytest.approx(cheapest[0] / cheapest[1])
    assert (
        min(row["usd"][1] for row in told["rows"] if row["per"] == "gpu") < cheapest[1]
    )  # of another model, on an H200
    assert told["unequal"] and not any(text.startswith("model") for text in told["unequal"])
    assert all(f"the cheapest of each: {text}" in "\n".join(lines) for text in told["unequal"])


def test_where_no_model_has_both_there_is_no_ratio(capsys):
    lines, told = run(capsys, "--instance", "c7a.48xlarge", "hf-h200", "--on", "2026-10-01")
    assert (
        {row["per"] for row in told["rows"]} == {"core", "gpu"}
        and told["cores_over_gpus"] is None
        and "model" not in told
    )
    assert "no model here has an RTFx on cores and on GPUs" in "\n".join(lines)
    assert [row["break_even_rtfx"] for row in told["rows"]] == [None] * len(told["rows"])


def test_the_document_is_rebuilt_and_what_it_leaves_out_is_listed(capsys):
    lines, told = run(capsys, "--document")
    assert [row["instance"] for row in told["rows"]] == ["p4de.24xlarge", "c7a.48xlarge"] and told[
        "hours"
    ] == 1e6
    assert [round(row["usd"][1]) for row in told["rows"]] == [2494, 11404]
    assert round(told["cores_over_gpus"][1], 2) == 4.57
    assert "document 000, Accelerating Leaderboard-Topping ASR Models" in "\n".join(lines)
    assert told["not_stated"] == [row["input"] for row in cost.stated_inputs() if not row["stated"]]
    text = "\n".join(lines)
    assert (
        all(f"  {name}; here " in text for name in told["not_stated"])
        and "RTFx of AMD EPYC 9454, price of AMD EPYC 9R14" in text
    )


def test_a_machine_of_ones_own_by_hand(capsys):
    arguments = "--units 10 --price 2 --rtfx 4:5:8 --hours 1000 --utilisation 0.5 --startup 1800 --instances 2".split()
    lines, told = run(capsys, *arguments, "--storage", "0.1", "--egress", "0.5")
    (row,) = told["rows"]
    parts = {name: [round(end, 6) for end in ends] for name, ends in row["parts"].items()}
    assert parts == {
        "compute": [50, 80, 100],
        "startup": [2, 2, 2],
        "storage": [11.52] * 3,
        "egress": [57.6] * 3,
    }
    assert row["usd"] == pytest.approx([121.12, 151.12, 171.12]) and row["usd_per_million_hours"][
        1
    ] == pytest.approx(151_120)
    head, line = cells(lines)
    assert (
        line[5] == "151,120 (121,120–171,120)"
        and head[6] == "USD/1,000 hours"
        and line[6] == "151.1 (121.1–171.1)"
        and cells(lines, "#  model")[1][2] == "assumed"
    )
    assert "cores_over_gpus" not in told and row["break_even_rtfx"] is None


def test_own_price_and_rtfx_stand_for_those_of_an_instance(capsys):
    _, told = run(capsys, "--instance", "p4de.24xlarge", "--price", "8", "--rtfx", "1000")
    (row,) = told["rows"]
    assert row["usd"] == [1000, 1000, 1000] and (row["origin"], row["per"], row["units"]) == (
        "assumed",
        "gpu",
        8,
    )


def test_the_day_decides_the_price(capsys):
    _, then = run(capsys, "--instance", "p4de.24xlarge", "--on", "2025-01-01")
    _, now = run(capsys, "--instance", "p4de.24xlarge")
    assert (
        then["rows"][0]["usd_per_hour"][1] == 40.96575
        and now["rows"][0]["usd_per_hour"][1] == 27.44705
    )


def test_what_was_measured_here_takes_the_place_of_what_others_said(tmp_path, capsys):
    told = {"preset": "parakeet_rnnt_1_1b", "audio_s": 16}
    made = records.Measurement(
        "recogniser-one-core", "rtfx", "s/s", 6.0, samples=(6.0, 6.0), params=told, impl="mine"
    )
    records.append(tmp_path / "bench.jsonl", made)
    arguments = [
        "--measured",
        str(tmp_path / "bench.jsonl"),
        "--instance",
        "c7a.48xlarge",
        "p4de.24xlarge",
    ]
    _, found = run(capsys, *arguments)
    cores = [row for row in found["rows"] if row["per"] == "core"]
    assert {row["origin"] for row in cores} == {"measured here"} and [6.0] * 3 in [
        row["rtfx"] for row in cores
    ]
    assert {row["origin"] for row in found["rows"] if row["per"] == "gpu"} == {"published"}
    lines, found = run(capsys, *arguments[:2], "--model", "parakeet_rnnt_1_1b")
    assert len(
        found["left_out"]
    ) >= 1 and f"left out: {', '.join(found['left_out'])}: no RTFx of" in "\n".join(lines)


def test_records_that_are_shipped_were_not_measured_here(capsys):
    _, told = run(capsys)
    assert "measured here" not in {row["origin"] for row in told["rows"]}
    assert {row["origin"].partition(",")[0] for row in told["rows"]} == {"published", "recorded"}


def test_a_model_that_is_asked_for_is_the_only_one_and_machines_without_it_are_named(capsys):
    lines, told = run(capsys, "--model", "parakeet_ctc_1_1b")
    assert {row["model"] for row in told["rows"]} == {"parakeet_ctc_1_1b"} and {
        "c7a.48xlarge",
        "hf-h200",
    } <= {*told["left_out"]}
    assert (
        f"left out: {', '.join(told['left_out'])}: no RTFx of parakeet_ctc_1_1b is known" in lines
    )


def test_a_file_that_is_empty_or_of_others_is_no_measurement_of_this_machine(tmp_path, capsys):
    made = records.Measurement(
        "recogniser-one-core",
        "rtfx",
        "s/s",
        6.0,
        params={"preset": "parakeet_rnnt_1_1b", "audio_s": 16},
    )
    body = made.record() | {"machine": made.record()["machine"] | {"id": "0123456789ab"}}
    foreign = json.dumps(body) + "\n"
    for text, why in (
        ("", "records of a whole"), (foreign, "records of a whole"),
    ):  # fmt: skip
        (tmp_path / "own.jsonl").write_text(text)
        assert main(["cost", "--measured", str(tmp_path / "own.jsonl")]) == 2
        out, err = capsys.readouterr()
        assert (
            err.startswith(f"asrkit cost: --measured: expected {why}")
            and err.count("\n") == 1
            and out == ""
        )


@pytest.mark.parametrize("arguments, message", [
    ("--hours nan", "--hours: expected a number, 0 or in 1e-12..1e12, got 'nan'"), ("--hours 0", "--hours: expected above 0"),
    ("--hours 1:2", "--hours: expected a number, 0 or in 1e-12..1e12, got '1:2'"), ("--hours -1", "--hours: expected"),
    ("--instance nope", "--instance: expected one of c7a.48xlarge, c7i.48xlarge"),
    ("--instance g6.xlarge", "--rtfx: expected yours"), ("--rtfx 0", "--rtfx: expected above 0"),
    ("--rtfx x", "--rtfx: expected a number"), ("--rtfx 5:4", "--rtfx: expected a number"),
    ("--rtfx inf", "--rtfx: expected a number"), ("--rtfx 5 --per gpu", "--per: expected what c7a.48xlarge has"),
    ("--per gpu", "--per: expected --rtfx beside it"), ("--utilisation 0", "--utilisation: expected above 0, at most 1"),
    ("--utilisation 0.5:2", "--utilisation: expected above 0, at most 1, got 2.0"),
    ("--price 0 --instance c7a.48xlarge", "--price: expected above 0"), ("--price 3", "--price: expected one --instance"),
    ("--units 4", "--units: expected --price and --rtfx"), ("--units 0 --price 1 --rtfx 4", "--units: expected at least 1"),
    ("--on monday", "--on: expected a day such as"), ("--on 2020-01-01", "--on: expected a day of which there are prices"),
    ("--model foo", "--model: expected one of parakeet_rnnt_1_1b"), ("--instances 0 --startup 1", "--instances: expected a whole"),
    (f"--instances {'9' * 400} --startup 1", "--instances: expected a whole"),
    (f"--units {'9' * 400} --price 1 --rtfx 4", "--units: expected at least 1, at most 1e9"),
    ("--hours 1e308 --storage 1e300", "--hours: expected"), ("--rtfx 1e-320", "--rtfx: expected"),
    ("--rtfx=", "--rtfx: expected"), ("--price= --instance c7a.48xlarge", "--price: expected"), ("--on=", "--on: expected a day"),
    ("--model=", "--model: expected one of"), ("--on 2024-13-99", "--on: expected a day"),
    ("--document --hours 7", "--hours: expected none beside --document"), ("--document --rtfx 5", "--rtfx: expected none beside"),
    ("--document --model foo", "--model: expected none beside"), ("--document --on 2025-01-01", "--on: expected none beside"),
    ("--document --instance c7a.48xlarge", "--instance: expected none beside"), ("--model foo --rtfx 5", "--model: expected none"),
    ("--units 4 --price 1 --rtfx 4 --on 2025-01-01", "--on: expected none beside --units"),
    ("--months 2", "--months: expected --storage beside it"), ("--instances 2", "--instances: expected --startup beside it"),
    ("--measured .", "--measured: expected a file"),
    ("--startup nan", "--startup: expected"), ("--egress -1", "--egress: expected"), ("--storage x", "--storage: expected"),
    ("--months nan --storage 1", "--months: expected a number"),
    ("--measured nowhere.jsonl", "--measured: expected a file of records"),
])  # fmt: skip
def test_nonsense_is_one_line(arguments, message, capsys):
    assert main(["cost", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"asrkit cost: {message}") and err.count("\n") == 1 and out == ""
