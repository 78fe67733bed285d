import json
import math

import pytest

from asrkit.cli import main
from asrkit.models import (
    ConvConfig,
    StatelessConfig,
    TransducerConfig,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train


@pytest.fixture
def model(learned, tmp_path):
    """The trained model as a file."""
    save_checkpoint(tmp_path / "model.safetensors", learned)
    return str(tmp_path / "model.safetensors")


def test_without_a_model_the_one_in_the_home_is_used_as_training_left_it(
    tiny_speech, speech, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    config = TransducerConfig(
        vocab_size=28,
        encoder=ConvConfig(width=24, layers=1),
        predictor=StatelessConfig(width=24),
        joint_width=24,
    )
    short = TrainConfig(steps=1, seconds=math.inf, batch_seconds=6.0, threads=1)
    train(
        config,
        CharTokenizer(),
        tiny_speech,
        out=tmp_path / "demo",
        config=short,
        progress=False,
    )
    assert main(["transcribe", str(speech[0])]) == 0
    assert capsys.readouterr().err.startswith("1 of 1 file transcribed; ")


def test_without_a_model_and_a_demo_the_notebook_that_makes_it_is_named(
    speech, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    (tmp_path / "demo").mkdir()
    assert main(["transcribe", str(speech[0])]) == 2
    wanted = f"--model: expected the demo of notebook 00, got none in {tmp_path / 'demo'}. Run it (make report), or pass --model."
    assert capsys.readouterr().err == f"asrkit transcribe: {wanted}\n"


def test_a_line_a_file_in_the_order_given_and_the_counts_on_stderr(
    model, speech, tmp_path, capsys
):
    files = [str(speech[1]), str(tmp_path / "none.wav"), str(speech[0])]
    assert main(["transcribe", *files, "--model", model]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [files[0], files[2]] and all(
        line.split("\t")[1] for line in lines
    )
    wrong, last = err.splitlines()
    assert (
        wrong
        == f"{files[1]}: audio: expected a WAV, FLAC, OGG or MP3 file, got {files[1]!r}. Check the path."
    )
    assert (
        last.startswith("2 of 3 files transcribed, 1 failed; ")
        and " s of audio at RTFx " in last
    )


def test_with_a_folder_the_last_line_names_it_and_json_has_the_counts(
    model, speech, tmp_path, capsys
):
    command = [
        "transcribe",
        str(speech[0]),
        "--model",
        model,
        "--out",
        str(tmp_path / "text"),
    ]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and out.endswith(
        f". Transcripts: {tmp_path / 'text'}\n"
    )
    assert err == "" and main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    counts = json.loads(out)
    assert [*counts] == [
        "files",
        "failed",
        "skipped",
        "audio_s",
        "rtfx",
        "out",
    ] and err == ""
    assert (counts["files"], counts["failed"], counts["skipped"]) == (1, 0, 1)
    assert counts["out"] == str(tmp_path / "text")


def test_json_has_words_with_times_if_asked_and_a_folder_is_searched(
    model, speech, capsys
):
    plain = ["--format", "json"]
    for more, has in (
        (plain, False),
        (["--json"], False),
        ([*plain, "--timestamps"], True),
    ):
        assert main(["transcribe", str(speech[0].parent), "--model", model, *more]) == 0
        out, err = (
            capsys.readouterr()
        )  # what is redirected to a file is of recordings only
        lines = [json.loads(line) for line in out.splitlines()]
        assert err.startswith(f"{len(speech)} of {len(speech)} files transcribed; ")
        assert [line["file"] for line in lines] == [str(path) for path in speech]
        assert all(("words" in line) == has for line in lines)


def test_an_output_that_cannot_be_written_is_told_before_the_model_is_loaded(
    speech, tmp_path, capsys
):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file/transcripts", tmp_path / "file/a/b"):
        arguments = [
            "transcribe",
            str(speech[0]),
            "--model",
            "none.nemo",
            "--out",
            str(out),
        ]
        assert main(arguments) == 2
        wanted = f"asrkit transcribe: {out} cannot be written: Not a directory\n"
        assert capsys.readouterr().err == wanted
