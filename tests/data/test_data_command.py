import json

import pytest

from asrkit.cli import main
from asrkit.data import corpora
from asrkit.data.batching.lengths import Lengths


def data(capsys, *arguments):
    """The JSON that the command prints, and its stderr."""
    assert main(["data", *map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_data_alone_lists_its_commands(capsys):
    assert main(["data"]) == 2
    usage = capsys.readouterr().err
    assert usage.startswith("usage: asrkit data")
    assert all(f"\n    {leaf} " in usage for leaf in ("prepare", "stats", "lengths"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "prepare nowhere",
            "corpus: expected digits, spoken_commands, mini_librispeech, librispeech or a folder",
        ),
        (
            "prepare librispeech --parts dev",
            "--parts: expected some of dev-clean, dev-other, test-clean",
        ),
        (
            "prepare mini_librispeech --out out --mirror http://127.0.0.1:9",
            "--mirror: expected an answer from http://127.0.0.1:9, got <urlopen error [Errno 111] Connection refused>.",
        ),
        (
            "stats nowhere --no-progress",
            "target: expected a manifest, a table (.csv, .csv.gz) or one of ami_segments",
        ),
        (
            "stats ami_segments --batch 0 --no-progress",
            "--batch: expected at least 1, got 0.",
        ),
        (
            "stats ami_segments --tokenizer no.model --no-progress",
            "--tokenizer: expected 'char' or a SentencePiece",
        ),
        (
            "lengths ami_segments --out a.xyz --no-progress",
            "--out: expected a name that ends in .csv or .csv.gz, got 'a.xyz'.",
        ),
    ],
)
def test_mistakes_give_one_line_and_write_nothing(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    leaf, *_ = arguments.split()
    assert main(["data", *arguments.split()]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()  # after lhotse's bar
    assert line.startswith(f"asrkit data {leaf}: {message}")
    # lhotse leaves an empty archive, which the next run fills
    written = [path for path in tmp_path.rglob("*") if path.stat().st_size]
    assert {path.name for path in written if path.is_file()} <= {".lock"}


def test_a_prepared_folder_serves_training_stats_and_a_table(libri, tmp_path, capsys):
    folder = libri("train-x")
    target = ("--out", tmp_path / "out", "--no-progress")
    summary, stderr = data(capsys, "prepare", folder.parent, *target)
    manifests = summary["manifests"]
    assert summary["parts"] == {"train-x": 4}
    assert stderr == "train-x: 4 utterances\n"
    assert len(corpora.load(manifests, progress=False)["train"]) == 4
    table = tmp_path / "lengths.csv.gz"
    options = ("--out", table, "--tokenizer", "char", "--no-progress")
    written, _ = data(capsys, "lengths", *manifests, *options)
    assert written == {"out": str(table), "utterances": 4, "hours": 0.0005}
    lengths = Lengths.read(table)
    assert lengths.seconds.tolist() == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert lengths.tokens.tolist() == [11, 17] * 2
    of_table, _ = data(capsys, "stats", table)
    of_manifest, stderr = data(capsys, "stats", *manifests, "--no-progress")
    assert of_table == of_manifest
    assert of_table["tokens"] == 56
    assert stderr == ""


def test_stats_are_a_table_and_a_histogram(tmp_path, capsys):
    (tmp_path / "m.csv").write_text("seconds,tokens\n1.5,5\n3.0,12\n")
    assert main(["data", "stats", str(tmp_path / "m.csv")]) == 0
    text = capsys.readouterr().out
    assert "2 utterances, 0.00 hours, 17 tokens" in text
    assert "█" in text
