"""`asrkit cost`: the table and the JSON agree, and bad arguments give one line."""

import json

import pytest

from asrkit.cli import main
from asrkit.workbench.cost.ranges import Range


def run(capsys, *arguments):
    """The text of `asrkit cost` with single spaces, and its result with --json."""
    outputs = []
    for form in ([], ["--json"]):
        assert main(["cost", *arguments, *form]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        outputs.append(out)
    text, line = outputs
    assert line.count("\n") == 1
    return " ".join(text.split()), json.loads(line)


def test_the_table_and_the_json_agree(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text, result = run(capsys)
    assert {row["origin"] for row in result["rows"]} == {"published", "recorded"}
    nouns = {"core": "cores", "gpu": "GPUs"}
    for number, row in enumerate(result["rows"], 1):
        noun = nouns[row["per"]][: None if row["units"] > 1 else -1]
        usd = Range(*row["usd_per_million_hours"])
        rtfx = Range(*row["rtfx"])
        shown = f"{row['instance']} {row['units']} {noun} {rtfx} {row['batch']} {usd}"
        assert f"{number} {shown}" in text
        assert f"{number} {row['model']} {row['origin']}" in text
        if row["against"]:
            assert str(Range(*row["break_even_rtfx"])) in text


@pytest.mark.parametrize(("unit", "noun"), [("cores", "cores"), ("gpus", "GPUs")])
def test_a_machine_of_ones_own_by_hand(capsys, unit, noun):
    options = f"--{unit} 10 --price 2 --rtfx 4:5:8 --hours 1000 --utilisation 0.5"
    text, result = run(capsys, *options.split())
    (row,) = result["rows"]
    assert row["usd"] == pytest.approx([50, 80, 100])
    assert f"10 {noun} 5 (4–8) – 80 (50–100)" in text


def test_an_rtfx_and_a_price_replace_the_known_ones(capsys):
    _, result = run(capsys, *"--instance c7a.48xlarge --price 1.92 --rtfx 10".split())
    (row,) = result["rows"]  # a cent a core
    assert row["usd"][1] == pytest.approx(1000)
    assert row["origin"] == "assumed"


def test_only_the_requested_model_is_shown(capsys):
    _, result = run(capsys, "--model", "parakeet_ctc_1_1b")
    found = {(row["model"], row["instance"]) for row in result["rows"]}
    assert found == {("parakeet_ctc_1_1b", "p4de.24xlarge")}


@pytest.mark.parametrize("arguments, message", [
    ("--hours nan", "--hours: expected above 0"),
    ("--instance nope", "--instance: expected one of c7a.48xlarge, c7i.48xlarge"),
    ("--instance g6.xlarge", "--rtfx: expected an RTFx for g6.xlarge"),
    ("--rtfx x", "--rtfx: expected a number"),
    ("--utilisation 0.5:2", "--utilisation: expected above 0, at most 1"),
    ("--price 3", "--price: expected one --instance"),
    ("--cores 4 --rtfx 4", "--price: expected a number"),
    ("--model foo", "--model: expected one whose RTFx is known"),
])  # fmt: skip
def test_nonsense_is_one_line(arguments, message, capsys):
    assert main(["cost", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"asrkit cost: {message}")
    assert err.count("\n") == 1
    assert out == ""
