"""`asrkit scale`: the table and the JSON say the same, and nonsense is one line."""

import json

import pytest

from asrkit.cli import main
from asrkit.workbench import cost

SMALL = ["--hours", "1000", "--workers", "1", "4", "--rtfx", "100"]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys, *arguments):
    """The lines of text of `asrkit scale`, and what it says with --json."""
    assert main(["scale", *arguments]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert main(["scale", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return text.splitlines(), json.loads(out)


def test_a_million_hours_on_gpus_and_cores_as_text_and_json(capsys):
    lines, told = run(capsys)
    rows = told["rows"]
    workers = [(row["workers"], row["per"]) for row in rows]
    assert workers == [(1, "gpu"), (8, "gpu"), (64, "gpu"), (1000, "core")]
    assert [row["rtfx"] for row in rows] == [2053.15] * 3 + [4.5]
    assert told["hours"] == 1e6 and all(row["shard_h"] == 20 for row in rows)
    for row in rows:
        ideal_days = 1e6 / row["rtfx"] / row["workers"] / 24
        assert ideal_days <= row["days"] < 1.4 * ideal_days
        assert row["source"].startswith("https://") and "published" in row["rtfx_is"]
    text = "\n".join(lines)
    assert "1,000,000 hours of speech in mp3, by fixed parts" in text
    for name, row in zip(("1 GPU ", "8 GPUs", "64 GPUs", "1,000 cores"), rows, strict=True):
        line = next(line for line in lines if line.startswith(name))
        assert f"{row['days']:,.3g}" in line and f"{row['usd']:,.0f}" in line
    assert max(map(len, (line for line in lines if "https" not in line))) <= 100
    assert text.count("https://") == 2  # each source once


def test_the_price_is_that_of_asrkit_cost_at_the_simulated_utilisation(capsys):
    _, told = run(capsys, "--hours", "1e5", "--workers", "16", "--instance", "p4de.24xlarge")
    (row,) = told["rows"]
    hours = row["days"] * 24 * 16  # paid hours of one GPU
    per_hour = cost.load_prices()["p4de.24xlarge"].usd_per_hour.middle / 8
    assert row["usd"] == pytest.approx(hours * per_hour, rel=1e-6)


def test_more_of_what_goes_wrong_takes_longer(capsys):
    def days(*arguments):
        return run(capsys, *SMALL, *arguments)[1]["rows"][1]["days"]

    quiet = days("--spread", "0", "--failure-hours", "inf", "--startup", "0", "--shard-hours", "1")
    assert quiet == pytest.approx(1000 / 400 / 24)
    base = ("--shard-hours", "5")
    assert days(*base, "--failure-hours", "0.1") > 1.1 * days(*base)
    assert days(*base, "--spread", "0.3") > 1.1 * days(*base, "--order", "queue", "--spread", "0.3")
    assert days(*base, "--startup", "3600") > 1 / 24
    mp3 = cost.stored_audio()["mp3"]
    slow = str(mp3.storage_MB_per_s(400.0) / 2)
    assert days(*base, "--storage-rate", slow) > 1.9 * days(*base)


def test_reading_threads_and_storage_are_told_and_may_be_too_few(capsys):
    mp3 = cost.stored_audio()["mp3"]
    rtfx = str(3 * mp3.thread_rtfx)
    given = ["--hours", "1e5", "--workers", "2", "--rtfx", rtfx, "--spread", "0"]
    _, told = run(capsys, *given)
    (row,) = told["rows"]
    assert row["readers"] == 6 and row["usd"] is None
    assert row["storage_MB_per_s"] == pytest.approx(mp3.storage_MB_per_s(6 * mp3.thread_rtfx))
    _, few = run(capsys, *given, "--readers", "1")
    assert few["rows"][0]["days"] > 2.5 * row["days"]
    lines, priced = run(capsys, *given, "--price", "2", "--per", "core")
    assert priced["rows"][0]["usd"] == pytest.approx(2 * 2 * 24 * row["days"])
    assert any(line.startswith("RTFx of a core: ") and "assumed" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "--workers: expected a whole number in 1..1,000,000, got 0."),
        (["--hours", "0"], "--hours: expected above 0, got 0.0."),
        (["--hours", "nan"], "--hours: expected above 0, got nan."),
        (["--rtfx", "-1"], "--rtfx: expected a number, 0 or in 1e-12..1e12, got '-1'."),
        (["--rtfx", "0"], "--rtfx: expected above 0, got 0."),
        (["--price", "2"], "--price: expected --rtfx beside it, got 2."),
        (["--per", "core"], "--per: expected --rtfx beside it, got core."),
        (["--rtfx", "5", "--model", "m"], "--model: expected none beside --rtfx, got m."),
        (["--instance", "none"], "--instance: expected one of c7a.48xlarge, "),
        (["--model", "whisper"], "--instance: expected one with a published RTFx of whisper, got p4de.24xlarge. Pass --rtfx, --per and --price."),
        (["--audio", "m4a"], "--audio: expected one of mp3, opus, flac, wav, got 'm4a'."),
        (["--shard-hours", "0"], "--shard-hours: expected above 0 hours, got 0.0."),
        (["--shard-hours", "0.1"], "--shard-hours: expected at most 1,000,000 shards, got 10,000,000. Make shards of 1 hours or more."),
        (["--failure-hours", "0.001"], "--shard-hours: expected shards that a worker hears in at most 0.005 hours"),
        (["--spread", "2"], "--spread: expected 0 to 1, got 2.0."),
        (["--startup", "-1"], "--startup: expected 0 seconds or more, got -1.0."),
        (["--readers", "0"], "--readers: expected at least 1, got 0."),
        (["--storage-rate", "0"], "--storage-rate: expected above 0, got 0.0."),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(arguments, said, capsys):
    assert main(["scale", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"asrkit scale: {said}") and err.count("\n") == 1
