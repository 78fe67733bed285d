"""`asrkit cost`: the table and the JSON say the same, and nonsense is one line."""

import json

import pytest

from asrkit.cli import main
from asrkit.workbench import records
from asrkit.workbench.cost.money import Range


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys, *arguments):
    """The text of `asrkit cost`, its spaces as one, and what it says with --json."""
    assert main(["cost", *arguments]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert main(["cost", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return " ".join(text.split()), json.loads(out)


def test_the_table_and_the_json_agree(capsys):
    text, told = run(capsys)
    assert {row["per"] for row in told["rows"]} == {"core", "gpu"}
    assert {row["origin"] for row in told["rows"]} == {"published", "recorded"}
    for number, row in enumerate(told["rows"], 1):
        units = f"{row['units']} {row['per']}" + "s" * (row["units"] > 1)
        usd = Range(*row["usd_per_million_hours"])
        rtfx = f"{Range(*row['rtfx'])} {row['batch']} {usd}"
        assert f"{number} {row['instance']} {units} {rtfx}" in text
        assert f"{number} {row['model']} {row['origin']}" in text
        if row["against"]:
            assert str(Range(*row["break_even_rtfx"])) in text
    ratio = Range(*told["cores_over_gpus"])
    assert f"{told['model']}: the cheapest on cores costs {ratio} times" in text
    assert told["unequal"] and all(
        f"the cheapest of each: {one}" in text for one in told["unequal"]
    )


def test_the_document_is_rebuilt_and_what_it_leaves_out_is_listed(capsys):
    text, told = run(capsys, "--document")
    usd = [(row["instance"], round(row["usd"][1])) for row in told["rows"]]
    assert usd == [("p4de.24xlarge", 2494), ("c7a.48xlarge", 11404)]
    assert "prices" in told["not_stated"]
    assert all(
        f"{name}; here {taken}" in text for name, taken in told["not_stated"].items()
    )


def test_a_machine_of_ones_own_by_hand(capsys):
    terms = "--utilisation 0.5 --startup 1800 --instances 2 --per-gb 0.6"
    options = f"--units 10 --price 2 --rtfx 4:5:8 --hours 1000 {terms}"
    text, told = run(capsys, *options.split())
    (row,) = told["rows"]  # startup 2, storage and transfer 69.12
    assert row["usd"] == pytest.approx([50 + 71.12, 80 + 71.12, 100 + 71.12])
    assert "10 cores 5 (4–8) – 151.1 (121.1–171.1)" in text


def test_what_was_measured_takes_the_place_of_what_others_said_of_cores(
    tmp_path, capsys
):
    params = {"preset": "parakeet_rnnt_1_1b", "audio_s": 16}
    value = ("recogniser-one-core", "rtfx", "s/s", 6.0)
    records.append(tmp_path / "own.jsonl", records.Measurement(*value, params=params))
    arguments = ["--instance", "c7a.48xlarge", "p4de.24xlarge"]
    _, found = run(capsys, *arguments, "--measured", str(tmp_path / "own.jsonl"))
    cores = [row["rtfx"] for row in found["rows"] if row["per"] == "core"]
    assert cores == [[6.0] * 3]
    assert {row["origin"] for row in found["rows"] if row["per"] == "gpu"} == {
        "published"
    }


def test_a_model_that_is_asked_for_is_the_only_one_and_machines_without_it_are_named(
    capsys,
):
    text, told = run(capsys, "--model", "parakeet_ctc_1_1b")
    assert {row["model"] for row in told["rows"]} == {"parakeet_ctc_1_1b"}
    assert {"c7a.48xlarge", "hf-h200"} <= {*told["left_out"]}
    assert f"left out, for want of an RTFx: {', '.join(told['left_out'])}" in text


@pytest.mark.parametrize("arguments, message", [
    ("--hours nan", "--hours: expected above 0"), ("--instance nope", "--instance: expected one of c7a.48xlarge, c7i.48xlarge"),
    ("--instance g6.xlarge", "--rtfx: expected yours"), ("--rtfx 0", "--rtfx: expected above 0"),
    ("--rtfx x", "--rtfx: expected a number"),
    ("--rtfx 5 --per gpu", "--per: expected what c7a.48xlarge has"),
    ("--utilisation 0.5:2", "--utilisation: expected above 0, at most 1"), ("--price 3", "--price: expected one --instance"),
    ("--units 4", "--units: expected --price and --rtfx"),
    ("--units 0 --price 1 --rtfx 4", "--units: expected 1 to 1e9"),
    ("--on 2020-01-01", "--on: expected a day of which there are prices"), ("--model foo", "--model: expected one of parakeet_rnnt_1_1b"),
    ("--document --on 2025-01-01", "--on: expected none beside --document"),
    ("--measured nowhere.jsonl", "--measured: expected a file of records"),
])  # fmt: skip
def test_nonsense_is_one_line(arguments, message, capsys):
    assert main(["cost", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (
        err.startswith(f"asrkit cost: {message}") and err.count("\n") == 1 and out == ""
    )
