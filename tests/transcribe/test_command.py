import gc
import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import soundfile
import torch

from asrkit.cpu import has_int8
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
def test_json_has_words_with_times_if_requested_and_a_folder_is_searched(
    speech, typed, more, has_words
):
    # what is redirected to a file is of recordings only
    _, out, _ = typed(speech[0].parent, "--json", more)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["file"] for line in lines] == [*map(str, speech)]
    assert {"words" in line for line in lines} == {has_words}


def torn(speech, folder):
    """A recording of two that is cut short within the second, and its readable part as a whole file."""
    folder.mkdir(exist_ok=True)
    wave = np.concatenate(
        [soundfile.read(path, dtype="float32")[0] for path in speech[:2]]
    )
    path = folder / "torn.wav"
    soundfile.write(path, wave, 16_000, subtype="FLOAT")
    path.write_bytes(path.read_bytes()[: -4 * 12_000])
    soundfile.write(
        folder.parent / "whole.wav", wave[:-12_000], 16_000, subtype="FLOAT"
    )
    return path, folder.parent / "whole.wav"


def test_the_text_before_the_break_of_a_file_is_written_but_not_as_its_transcript(
    speech, tmp_path, typed
):
    (path, whole), out = torn(speech, tmp_path / "in"), tmp_path / "out"
    text = typed(whole)[1].strip().split("\t")[1]
    assert len(text.split()) > 3
    code, output, err = typed(path, "--json")
    row = json.loads(output)
    assert (code, row["text"]) == (1, text)
    assert row["error"] in err
    assert "torn.wav cannot be read beyond" in row["error"]
    for mended in (False, True):
        if mended:
            soundfile.write(path, soundfile.read(speech[0])[0], 16_000)
        code, output, _ = typed(path, "--json", "--out", out)
        row = json.loads(output)
        failed = 0 if mended else 1
        assert (code, row["failed"], row["in_part"]) == (failed, failed, failed)
        names = {file.name for file in out.glob("[!.]*")}
        assert names == {"torn.txt" if mended else "torn.txt.partial"}
    code, output, err = typed(torn(speech, tmp_path / "in")[0], "--strict")
    assert (code, output) == (1, "")
    assert "cannot be read beyond" in err


def test_names_of_files_do_not_control_the_terminal(tmp_path, typed):
    path = tmp_path / "a\x1b[2J\x9b2J.wav"
    path.write_bytes(b"no sound")
    code, output, err = typed(tmp_path)
    assert (code, output) == (1, "") and "cannot be read" in err
    assert not {"\x1b", "\x9b"} & {*err}


def test_a_channel_is_chosen_and_channels_that_cancel_each_other_are_noticed(
    speech, tmp_path, typed
):
    wave = soundfile.read(speech[0])[0]
    path = tmp_path / "a.wav"
    soundfile.write(path, np.stack([wave, -wave, 0 * wave], 1), 16_000)
    wanted = typed(speech[0])[1].strip().split("\t")[1]
    code, out, err = typed(path, "--json")
    row = json.loads(out)
    assert (code, row["text"]) == (0, wanted)
    assert row["notes"] == [
        "channels cancel each other from 0 s on; the loudest one is used there (--channel selects another)"
    ]
    assert row["notes"][0] in err
    code, out, err = typed(path, "--channel 2", "--json")
    assert (code, json.loads(out)["text"]) == (0, "")
    assert "cancel" not in err


def test_what_a_folder_leaves_out_is_counted(speech, tmp_path, typed):
    shutil.copy(speech[0], tmp_path / "a.wave")
    for name in ("b.pdf", "c.pdf", "d"):
        (tmp_path / name).touch()
    _, _, err = typed(tmp_path)
    assert err.strip().endswith("; left out: 3 files (.pdf 2, no suffix 1)")
    _, out, _ = typed(tmp_path, "--json --out", tmp_path / "out")
    assert json.loads(out)["left_out"] == {".pdf": 2, "": 1}


def test_standard_input_is_a_recording_and_its_name_stays_one_field(
    speech, tmp_path, typed, monkeypatch
):
    wanted = typed(speech[0])[1].strip().split("\t")[1]
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(speech[0].read_bytes()))
    )
    assert typed("-")[:2] == (0, f"-\t{wanted}\n")
    shutil.copy(speech[0], tmp_path / "a\tb\nc.wav")
    assert typed(tmp_path)[1] == f"{tmp_path}/a b c.wav\t{wanted}\n"


def test_a_closed_standard_output_is_one_line(speech):
    command = f"{sys.executable} -m asrkit transcribe {speech[0]} --json >&-"
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "standard output is closed" in done.stderr


REFUSED = [  # options after the file and the model, and the message
    ("--batch-seconds 0", "--batch-seconds: expected more than 0 seconds, got 0.0."),
    ("--format vtt", "--format: expected --out with it, got none."),
    ("--timestamps", "--timestamps: expected --json, or with --out a --format that has times: json, srt, vtt, ctm, got none."),
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
    ("--shards --out OUT --channel 1", "--channel: expected none with --shards, got 1."),
    ("--channel -1", "--channel: expected 0 or more, got -1."),
    ("--shards --out OUT --strict", "--strict: expected none with --shards, got True."),
    ("many.jsonl", "files: expected sound files or folders, got many.jsonl. --shards reads manifests and .tar."),
    ("--out FILE", "--out: expected a folder, got 'FILE'."),
    ("--out FILE/a/b", "FILE/a/b cannot be written: Not a directory"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", REFUSED)
def test_wrong_options_of_the_command_are_one_line(
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


@pytest.mark.parametrize("collects", [True, False])
def test_collection_of_garbage_is_then_as_it_was(speech, typed, collects):
    (gc.enable if collects else gc.disable)()
    try:
        assert typed(speech[0])[0] == 0
        assert gc.isenabled() == collects
    finally:
        gc.enable()
        gc.unfreeze()


INT8 = pytest.param("int8", marks=pytest.mark.skipif(not has_int8(), reason="needs a CPU with AVX2"))  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", INT8])
def test_a_cold_start_loads_neither_compilers_nor_unneeded_packages(
    speech, tmp_path, dtype
):
    torch.manual_seed(0)
    model = TransducerModel(presets.tiny(vocab_size=28)).eval()
    checkpoint = Checkpoint(model, CharTokenizer(), {}, {})
    save_checkpoint(tmp_path / "model.safetensors", checkpoint)
    code = """if True:
        import sys
        from asrkit.cli import main
        assert main(sys.argv[1:]) == 0
        print(sorted({"numba", "torchaudio", "torch._dynamo", "torch.onnx", "lhotse"} & {*sys.modules}))"""
    command = f"transcribe {speech[0]} --model {tmp_path / 'model.safetensors'}"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "--dtype", dtype],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
