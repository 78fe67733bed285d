import json

import pytest

from asrkit.cli import main
from asrkit.data import corpora
from asrkit.data.batching.lengths import Lengths

LEAVES = ["prepare", "stats", "lengths"]


@pytest.fixture
def manifest(tmp_path):
    """Two lines of JSON with 1.5 and 3 s."""
    rows = [
        {"audio": "none.wav", "duration": s, "text": text}
        for s, text in ((1.5, "hello"), (3.0, "a longer one"))
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "m.jsonl"


def test_data_alone_says_what_there_is(capsys):
    assert main(["data"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: asrkit data") and all(
        f"\n    {leaf} " in err for leaf in LEAVES
    )


@pytest.mark.parametrize(("arguments", "message"), [
    (["prepare", "nowhere"], "corpus: expected digits, spoken_commands, mini_librispeech, librispeech or a folder"),
    (["prepare", "librispeech", "--parts", "dev"], "--parts: expected some of dev-clean, dev-other, test-clean"),
    (["prepare", "mini_librispeech", "--out", "out", "--mirror", "http://127.0.0.1:9"],
     "--mirror: expected an answer from http://127.0.0.1:9, got <urlopen error [Errno 111] Connection refused>."),
    (["stats", "nowhere"], "target: expected a manifest, a table (.csv, .csv.gz) or one of ami_segments"),
    (["stats", "ami_segments", "--batch", "0"], "--batch: expected at least 1, got 0."),
    (["stats", "ami_segments", "--tokenizer", "no.model"], "--tokenizer: expected 'char' or a SentencePiece"),
    (["lengths", "ami_segments", "--out", "a.xyz"], "--out: expected a name that ends in .csv or .csv.gz, got 'a.xyz'."),
])  # fmt: skip
def test_mistakes_give_one_line_and_write_nothing(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert (
        main(
            [
                "data",
                *arguments,
                *(["--no-progress"] if "prepare" not in arguments else []),
            ]
        )
        == 2
    )
    line = (
        capsys.readouterr().err.strip().splitlines()[-1]
    )  # behind lhotse's progress bar
    assert line.startswith(f"asrkit data {arguments[0]}: {message}")
    # lhotse leaves an empty archive, which the next run fills
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.stat().st_size and path.name not in {".lock", "out"}
    ]


def test_a_prepared_folder_goes_into_training_stats_and_a_table(
    libri, tmp_path, capsys
):
    folder, _ = libri("train-x")
    assert (
        main(
            [
                "data",
                "prepare",
                str(folder.parent),
                "--out",
                str(tmp_path / "out"),
                "--no-progress",
                "--json",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["parts"] == {"train-x": 4} and err == "train-x: 4 utterances\n"
    assert len(corpora.load(summary["manifests"], progress=False)["train"]) == 4
    table = tmp_path / "lengths.csv.gz"
    assert (
        main(
            [
                "data",
                "lengths",
                *summary["manifests"],
                "--out",
                str(table),
                "--tokenizer",
                "char",
                "--no-progress",
                "--json",
            ]
        )
        == 0
    )
    written = json.loads(capsys.readouterr().out)
    lengths = Lengths.read(table)
    assert (
        lengths.seconds.tolist() == pytest.approx([0.3, 0.4, 0.5, 0.6])
        and lengths.tokens.tolist() == [11, 17] * 2
    )
    assert written == {"out": str(table), "utterances": 4, "hours": 0.0005}
    assert (
        main(["data", "stats", str(table), "--json"])
        == main(["data", "stats", *summary["manifests"], "--json", "--no-progress"])
        == 0
    )
    of_table, of_manifest = capsys.readouterr().out.splitlines()
    assert of_table == of_manifest and json.loads(of_table)["tokens"] == 56


def test_stats_are_a_table_and_a_histogram_or_json(manifest, capsys):
    command = ["data", "stats", str(manifest), "--no-progress"]
    assert main(command) == 0
    text = capsys.readouterr().out.splitlines()
    assert (
        "2 utterances, 0.00 hours, 17 tokens" in text
        and sum("█" in one for one in text) == 2
    )
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["quantiles"]["seconds"]["median"] == 2.25
