import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
import soundfile
import torch

from asrkit.cli import main, parser
from asrkit.features import FeatureConfig
from asrkit.models import Checkpoint, ConvConfig, TransducerConfig, TransducerModel, save_checkpoint
from asrkit.text import CharTokenizer
from asrkit.workbench import records

COMMANDS = ["report", "bench", "cost", "train", "transcribe", "doctor", "ledger"]


@pytest.fixture
def model(tmp_path):
    """A checkpoint with random weights: enough to run everything but the quality."""
    torch.manual_seed(0)
    config = TransducerConfig(vocab_size=28, encoder=ConvConfig(width=16, layers=1))
    path = tmp_path / "model" / "model.safetensors"
    save_checkpoint(
        path, Checkpoint(TransducerModel(config), CharTokenizer(), asdict(FeatureConfig()), {})
    )
    return path


def sine(path, seconds=0.5, rate=16_000, channels=1):
    wave = torch.sin(torch.arange(int(seconds * rate)) * 0.1)[:, None].repeat(1, channels) * 0.1
    soundfile.write(str(path), wave.numpy(), rate)
    return str(path)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_argument(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "usage: asrkit" in capsys.readouterr().out
    actions = parser()._subparsers._group_actions[0].choices[command]._actions
    assert [a.dest for a in actions if not a.help] == []


def test_help_shows_the_defaults_that_say_something(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: char)" in said and "(default: 0)" in said
    assert not [default for default in ("None", "False", "[]") if f"(default: {default})" in said]


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (
        stop.value.code == 0
        and capsys.readouterr().out == f"asrkit {importlib.metadata.version('asrkit')}\n"
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_is_gone_ends_any_command_without_a_word(unbuffered):
    command, env = (
        [sys.executable, "-m", "asrkit", "ledger"],
        {**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as running:
        running.stdout.close()
        err = running.stderr.read()
    assert (running.returncode, err) == (141, "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_the_encoding_of_stdout_lacks_is_escaped(tmp_path, encoding):
    name = os.fsdecode("é".encode() + b"\xff.jsonl")  # no UTF-8
    done = subprocess.run(
        [sys.executable, "-m", "asrkit", "bench", name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
        capture_output=True,
    )
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert b"\\udcff" in done.stderr


def test_the_command_starts_without_importing_torch():
    code = "import sys, asrkit.cli as c; c.parser(); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "False"
    )


@pytest.mark.parametrize("format_", ["wav", "flac", "ogg"])
@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (16_000, 2), (44_100, 2)])
def test_transcribe_takes_any_format_rate_and_channels(
    model, tmp_path, capsys, format_, rate, channels
):
    name = sine(tmp_path / f"tone.{format_}", rate=rate, channels=channels)
    assert main(["transcribe", name, "--model", str(model), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert line["file"] == name and line["audio_s"] == pytest.approx(0.5, abs=0.01)
    assert err.startswith("1 of 1 file transcribed; 0.5 s of audio at RTFx ")


def test_a_broken_file_is_reported_and_the_rest_is_done(model, tmp_path, capsys):
    good, bad, empty = (
        sine(tmp_path / "good.wav"),
        tmp_path / "bad.wav",
        sine(tmp_path / "empty.wav", seconds=0),
    )
    bad.write_bytes(b"RIFF not really")
    code = main(
        ["transcribe", str(bad), good, str(tmp_path / "none.wav"), empty, "--model", str(model)]
    )
    out, err = capsys.readouterr()
    assert code == 1
    assert out.startswith(good) and out.count("\n") == 1
    assert (
        err.splitlines()[-1].startswith("1 of 4 files transcribed, 3 failed; ")
        and "bad.wav cannot be read" in err
        and "none.wav" in err
        and "empty.wav" in err
        and "Traceback" not in err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["transcribe", "a.wav", "--model", "nowhere"],
            "model: expected a .safetensors file or a training folder",
        ),
        (["train", "--manifest", "nowhere.jsonl", "--out", "OUT"], "nowhere.jsonl"),
        (
            [
                "train",
                "--tokenizer",
                "nowhere.model",
                "--manifest",
                "nowhere.jsonl",
                "--out",
                "OUT",
            ],
            "nowhere",
        ),
        (
            ["train", "--seconds", "0", "--out", "OUT"],
            "--steps, --seconds: expected both > 0, got (100000, 0.0)",
        ),
        (["train", "--seed", "-1", "--out", "OUT"], "seed: expected at least 0, got -1"),
        (
            ["train", "--durations", "-1", "--manifest", "nowhere", "--out", "OUT"],
            "durations: expected distinct whole numbers",
        ),
        (
            ["train", "--device", "tpu", "--out", "OUT"],
            "device: expected cpu, or cuda where there is a GPU, got tpu",
        ),
        (
            ["bench", "features", "--threads", "0", "--out", "OUT"],
            "threads: expected at least 1, got 0",
        ),
        (
            ["bench", "features", "--out", "/proc/none/a.jsonl"],
            "/proc/none/a.jsonl cannot be written: ",
        ),
        (
            ["train", "--hold-out", "nobody", "--out", "OUT"],
            "--hold-out: expected a speaker of a manifest, got 'nobody'. spoken_commands has its",
        ),
        (["train", "--out", "/proc/x"], "asrkit train: /proc/x cannot be written: "),
        (
            ["transcribe", "a.wav", "--out", "/proc/x", "--model", "nowhere"],
            "asrkit transcribe: /proc/x cannot be written: ",
        ),
        (
            ["transcribe", "a.wav", "--model", __file__],
            "Pass a .safetensors file, a .nemo file or the folder of a model.",
        ),
        (["transcribe", "a.wav", "--threads", "-1"], "threads: expected at least 1, got -1"),
    ],
)
def test_bad_arguments_give_one_line_and_write_nothing(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) in (1, 2)
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err
    assert not list(tmp_path.iterdir())


def test_real_recordings_get_through(model, shared_speech, capsys):
    files = [
        shared_speech / "audio/fsdd/7_theo_3.wav",
        next((shared_speech / "audio/librispeech").glob("*.flac")),
    ]
    assert main(["transcribe", *map(str, files), "--model", str(model)]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and err.startswith("2 of 2 files transcribed; ")
    assert float(err.split("; ")[1].split()[0]) > 1


def test_training_without_training_speech_or_with_a_test_text_that_has_no_tokens_is_refused_at_once(
    tmp_path, capsys
):
    sine(tmp_path / "a.wav"), sine(tmp_path / "b.wav")
    rows = [
        {"audio": "a.wav", "text": "one", "split": "train"},
        {"audio": "b.wav", "text": "2", "split": "test"},
    ]
    manifest, out = tmp_path / "m.jsonl", tmp_path / "out"
    for some, wanted in (
        (
            rows[1:],
            "manifest: expected utterances to train on, got {'train': 0, 'dev': 0, 'test': 1}",
        ),
        (rows, "['2'] in '2'"),
    ):
        manifest.write_text("\n".join(map(json.dumps, some)))
        assert (
            main(
                [
                    "train",
                    "--manifest",
                    str(manifest),
                    "--out",
                    str(out),
                    "--steps",
                    "1",
                    "--no-progress",
                ]
            )
            == 2
        )
        err = capsys.readouterr().err.strip()
        assert wanted in err and "\n" not in err and not out.exists()
    assert main(["train", "--manifest", "none.jsonl", "--out", str(manifest)]) == 2
    assert "out: expected a folder" in capsys.readouterr().err


def test_the_ledger_prints_an_answer_a_document_and_a_line_a_claim_with_its_tolerance(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ledger", "--document", "003"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["ledger", "--document", "003"]) == 0
    out = capsys.readouterr().out
    assert "003: Training NeMo RNN-T Models Efficiently with Numba FP16 Support" in out
    assert re.search(
        r"frames-after-8x +200 frames +within 10 % of 200 frames +212.5 frames \(computed\)", out
    )
    assert "frames-of-20s" not in out
    assert main(["ledger", "--document", "003", "--appendix", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    rows = {row["id"]: row for row in found["claims"]}
    assert rows["frames-after-8x"]["tolerance"] == "within 10 % of 200 frames"
    assert rows["frames-of-20s"]["appendix"] == "tautology" and "frames-of-20s" in err
    (document,) = found["documents"]
    assert document["claims"] + document["appendix"] == len(rows)
    assert document["sentence"] in " ".join(err.split()) and found["summary"].endswith(
        "more in the appendix."
    )


def test_the_ledger_takes_more_records_and_refuses_unknown_documents(tmp_path, capsys):
    made = records.Measurement("librispeech-longest", "longest", "s", 17.0).record()
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(made) + "\n")
    assert main(["ledger", str(path), "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)["claims"]}
    longest = rows["librispeech-longest"]
    assert (longest["verdict"], longest["measured"]) == ("reproduced", "17 s")
    assert main(["ledger", "--document", "005"]) == 2
    assert "document: expected one of 000, 001" in capsys.readouterr().err
