import json
import subprocess
import sys

import pytest
import torch

from asrkit.models import Checkpoint, TransducerModel, presets, save_checkpoint
from asrkit.text import CharTokenizer


def test_a_line_a_file_in_the_order_given_and_the_counts_on_stderr(
    speech, tmp_path, typed
):
    none = tmp_path / "none.wav"
    code, out, err = typed(speech[1], none, speech[0])
    files, texts = zip(*(line.split("\t") for line in out.splitlines()), strict=True)
    assert files == (str(speech[1]), str(speech[0]))
    assert all(texts)
    assert code == 1
    wrong, last = err.splitlines()
    wanted = f"expected a sound file, got none at '{none}'. Check the path."
    assert wrong == f"{none}: audio: {wanted}"
    assert last.startswith("2 of 3 files transcribed, 1 failed, 0 done before; ")
    assert " s of audio at RTFx " in last


@pytest.mark.parametrize("more, has_words", [("", False), ("--timestamps", True)])
def test_json_has_words_with_times_if_asked_and_a_folder_is_searched(
    speech, typed, more, has_words
):
    # what is redirected to a file is of recordings only
    _, out, _ = typed(speech[0].parent, "--json", more)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["file"] for line in lines] == [*map(str, speech)]
    assert {"words" in line for line in lines} == {has_words}


REFUSED = [  # what is typed behind the file and the model, and the message
    ("--batch-seconds 0", "--batch-seconds: expected more than 0 seconds, got 0.0."),
    ("--format vtt", "--format: expected --out with it, got none."),
    ("--timestamps", "--timestamps: expected --json, or with --out a --format that has times: json, srt, vtt or ctm, got none."),
    ("--lm-weight 1", "--lm-weight: expected --lm with it, got none."),
    ("--lm none.arpa", "--lm: expected an ARPA file, got 'none.arpa'. Check the path."),
    ("--language de", "--language: expected none, since this CTCModel has no prompt with a place for it, got 'de'."),
    ("--context 4 4", "--model: expected one with a FastConformer, got ConvEncoder."),
    ("--threads -1", "--threads: expected 1 to 1,024, got -1."),
    ("--device tpu", "--device: expected cpu, or cuda where there is a GPU, got tpu. asrkit doctor says more."),
    ("--workers two", "the cores of this process, got two."),
    ("--workers 2 --engine openvino", "--workers: expected none with --engine, got 2."),
    ("--shards", "--shards: expected --out with it, got none."),
    ("--shards --out OUT --part 2/2", "--part: expected K/N with K from 0 to N - 1, such as 0/8, got 2/2."),
    ("--shards --out OUT --shard-hours 0", "--shard-hours: expected more than 0 hours, got 0.0."),
    ("--shards --out OUT --on ray --part 0/2", "--part: expected none with --on, got 0/2."),
    ("--shards --out OUT --on ray --actors 0", "--actors: expected 1 or more, got 0."),
    ("--out FILE", "--out: expected a folder, got 'FILE'."),
    ("--out FILE/a/b", "FILE/a/b cannot be written: Not a directory"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", REFUSED)
def test_what_cannot_be_asked_for_is_one_line(
    speech, typed, options, message, tmp_path, monkeypatch
):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(speech[0], options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("asrkit transcribe: ")
    assert err.endswith(f"{message}\n")
    assert not (tmp_path / "OUT/plan.jsonl").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_is_bfloat16_where_the_device_has_it(speech, typed, monkeypatch, dtype):
    has = {"amx_bf16": dtype == "bfloat16"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    code, _, err = typed(speech[0], "--dtype auto")
    assert (code, err.splitlines()[0]) == (0, f"dtype: {dtype}")


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
    command = f"transcribe {speech[0]} --model {tmp_path / 'model.safetensors'}"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "--dtype", "float32"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
