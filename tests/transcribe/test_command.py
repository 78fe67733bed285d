import json
import subprocess
import sys

import pytest
import torch

from asrkit.cli import main
from asrkit.models import (
    Checkpoint,
    TransducerModel,
    presets,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.transcribe.shards import load_plan

PLAIN = ["transcribe", "--dtype", "float32"]  # as the library transcribes


@pytest.fixture
def model(learned, tmp_path):
    """The trained model as a file."""
    save_checkpoint(tmp_path / "model.safetensors", learned)
    return str(tmp_path / "model.safetensors")


def test_without_a_model_the_demo_is_used_or_the_notebook_that_makes_it_is_named(
    learned, speech, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    demo = tmp_path / "demo"
    assert main([*PLAIN, str(speech[0])]) == 2
    wanted = f"--model: expected the demo of notebook 00, got none in {demo}. Run it (make report), or pass --model."
    assert capsys.readouterr().err == f"asrkit transcribe: {wanted}\n"
    save_checkpoint(demo / "model.safetensors", learned)
    assert main([*PLAIN, str(speech[0])]) == 0
    assert capsys.readouterr().err.startswith("1 of 1 file transcribed, ")


def test_a_line_a_file_in_the_order_given_and_the_counts_on_stderr(
    model, speech, tmp_path, capsys
):
    files = [str(speech[1]), str(tmp_path / "none.wav"), str(speech[0])]
    assert main([*PLAIN, *files, "--model", model]) == 1
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
        last.startswith("2 of 3 files transcribed, 1 failed, 0 done before; ")
        and " s of audio at RTFx " in last
    )


def test_with_a_folder_the_last_line_names_it_and_json_has_the_counts(
    model, speech, tmp_path, capsys
):
    command = [
        *PLAIN,
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
    for more, has in (["--json"], False), (["--json", "--timestamps"], True):
        assert main([*PLAIN, str(speech[0].parent), "--model", model, *more]) == 0
        out, err = (
            capsys.readouterr()
        )  # what is redirected to a file is of recordings only
        lines = [json.loads(line) for line in out.splitlines()]
        assert err.startswith(f"{len(speech)} of {len(speech)} files transcribed, ")
        assert [line["file"] for line in lines] == [str(path) for path in speech]
        assert all(("words" in line) == has for line in lines)


REFUSED = [  # what is typed behind the file and the model, and the message
    ("--batch-seconds 0", "--batch-seconds: expected more than 0 seconds, got 0.0."),
    ("--format vtt", "--format: expected --out with it, got vtt."),
    ("--timestamps", "--timestamps: expected --json, or with --out a --format that has times: json, srt, vtt or ctm, got none."),
    ("--lm-weight 1", "--lm-weight: expected --lm with it, got 1.0."),
    ("--lm none.arpa", "[Errno 2] No such file or directory: 'none.arpa'"),
    ("--language de", "--language: expected none, since this CTCModel has no prompt with a place for it, got 'de'."),
    ("--context 4 4", "--model: expected one with a FastConformer, got ConvEncoder."),
    ("--threads -1", "--threads: expected 1 to 1,024, got -1."),
    ("--device tpu", "--device: expected cpu, or cuda where there is a GPU, got tpu. asrkit doctor says more."),
    ("--workers 2 --engine openvino", "--workers: expected none with --engine, got 2."),
    ("--engine openvino --context 4 4", "--context: expected none with --engine, got [4, 4]."),
    ("--shards", "--shards: expected --out with it, got True."),
    ("--shards --out OUT --format srt", "--format: expected none with --shards, got srt."),
    ("--shards --out OUT --engine openvino", "--shards: expected none with --engine, got True."),
    ("--shards --out OUT --part 2/2", "--part: expected K/N with K from 0 to N - 1, such as 0/8, got 2/2."),
    ("--shards --out OUT --shard-hours 0", "--shard-hours: expected more than 0 hours, got 0.0."),
    ("--shards --out OUT --on ray --part 0/2", "--part: expected none with --on, got 0/2."),
    ("--part 0/2", "--part: expected --shards with it, got 0/2."),
    ("--shards --out OUT --actors 2", "--actors: expected --on with it, got 2."),
    ("--out FILE/a/b", "FILE/a/b cannot be written: Not a directory"),
]  # fmt: skip


@pytest.mark.parametrize("typed, message", REFUSED)
def test_what_cannot_be_asked_for_is_one_line(
    model, speech, typed, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    assert main([*PLAIN, str(speech[0]), "--model", model, *typed.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("asrkit transcribe: ") and err.count("\n") == 1
    assert err.endswith(f"{message}\n") and not (tmp_path / "OUT/plan.jsonl").exists()


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bfloat16_where_the_device_has_it_and_shards_keep_the_plans(
    model, speech, tmp_path, monkeypatch, capsys, fast
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": fast})
    typed = ["transcribe", str(speech[0]), "--model", model, "--no-progress"]
    assert main(typed) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == ("dtype: bfloat16" if fast else "dtype: float32")
    out = tmp_path / "out"
    for more in (["--dtype", "float32"], []):
        assert main([*typed, "--out", str(out), "--shards", *more]) == 0
        out_, err = capsys.readouterr()
        assert out_.startswith("1 of 1 shards done: 1 recordings, ")
        assert err == "dtype: float32\n" * (not more)
    assert load_plan(out)[0].dtype == "float32"


def test_any_option_of_a_beam_asks_for_one(model, speech, capsys):
    assert main([*PLAIN, str(speech[0]), "--model", model]) == 0
    greedy = capsys.readouterr().out
    assert main([*PLAIN, str(speech[0]), "--model", model, "--label-bonus", "5"]) == 0
    assert len(capsys.readouterr().out) > len(greedy)


def test_a_cold_start_loads_neither_compilers_nor_what_this_recording_needs_not(
    speech, tmp_path
):
    torch.manual_seed(0)
    model = TransducerModel(presets.tiny(vocab_size=28)).eval()
    checkpoint = Checkpoint(model, CharTokenizer(), {}, {})
    save_checkpoint(tmp_path / "model.safetensors", checkpoint)
    code = """if True:
        import sys
        from asrkit.cli import main
        assert main(sys.argv[1:]) == 0
        print(sorted({"numba", "torchaudio", "torch._dynamo", "lhotse"} & {*sys.modules}))"""
    typed = [*PLAIN, str(speech[0]), "--model", str(tmp_path / "model.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", code, *typed], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
