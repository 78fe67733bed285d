"""A folder of transcripts: existing ones are done, whichever process wrote them and however its run ended."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asrkit.cli import main
from asrkit.cpu import fast_dtype, has_int8
from asrkit.files import LOCK
from asrkit.models import save_checkpoint
from asrkit.transcribe import Folder, Transcript
from asrkit.transcribe.formats import FORMATS
from asrkit.transcribe.plan import Plan

WANTED = "--out: expected transcripts of this model and these settings, got"


@pytest.fixture
def into(typed):
    """Runs the command with --out in small batches: (out, files and options) to its JSON, or the exit code, and stderr."""

    def run(out, *words):
        small = "--batch-seconds 0.3 --no-progress --json"
        code, output, err = typed(small, "--out", out, *words)
        return (json.loads(output) if output else code), err

    return run


def contents(folder):
    """Every file of a folder except the lock and the fingerprint."""
    kept = [path for path in folder.iterdir() if path.name not in (LOCK, ".asrkit-txt")]
    return {path.name: path.read_bytes() for path in kept}


def changed(folder):
    """The time at which each file of a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_file_each_is_written_in_any_format_and_a_second_run_skips_all(
    into, typed, speech, tmp_path
):
    for format_ in FORMATS:
        result, _ = into(tmp_path, *speech, "--format", format_)
        assert result["skipped"] == 0
        assert all((tmp_path / f"{n}.{format_}").read_bytes() for n in range(6))
    before = changed(tmp_path)
    counts = {"files": 6, "failed": 0, "in_part": 0, "skipped": 6}
    counts |= {"without_words": 0, "audio_s": 0.0}
    counts |= {"rtfx": 0.0, "left_out": {}}
    assert into(tmp_path, *speech) == (counts | {"out": str(tmp_path)}, "")
    _, out, _ = typed(*speech, "--no-progress --out", tmp_path)
    assert out.endswith(f". Transcripts: {tmp_path}\n")
    assert changed(tmp_path) == before


def test_a_run_killed_with_signal_9_and_run_again_gives_what_one_run_gives(
    into, speech, tmp_path, forked
):
    renames = 4  # one of them is of what made the transcripts
    whole, out = tmp_path / "whole", tmp_path / "out"
    into(whole, *speech)

    def killed():
        rename, left = os.replace, iter(range(renames, -1, -1))

        def replace_or_die(source, target):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        os.replace = replace_or_die
        into(out, *speech)

    process = forked(killed)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = [name for name in contents(out) if not name.startswith(".")]
    assert len(finished) == renames - 1
    assert len(contents(out)) == renames  # and what it was writing
    result, _ = into(out, *speech)
    assert result["skipped"] == len(finished)
    assert contents(out) == contents(whole)


def test_another_model_other_settings_and_files_of_others_are_refused(
    into, speech, other_model, tmp_path
):
    out, mine = tmp_path / "out", tmp_path / "mine" / "2.txt"
    into(out, *speech)
    result, _ = into(out, *speech, "--batch-seconds 9 --readers 2")  # no matter
    assert result["skipped"] == 6
    before = changed(out)
    mine.parent.mkdir()
    mine.write_text("my own notes")
    begun = f"with which {out} was begun, got"
    for more, message in (
        ("--window 20", f"--window: expected 30.0, {begun} 20.0"),
        ("--dtype bfloat16", f"--dtype: expected float32, {begun} bfloat16"),
        (
            "--window 9 --beam 2",
            f"--window, --beam: expected 30.0, None, {begun} 9.0, 2",
        ),
        (f"--model {other_model}", f"--model: expected HASH, {begun} HASH"),
        (f"--out {mine.parent}", f"{WANTED} {mine}"),
    ):
        code, err = into(out, *speech, more)
        assert code == 2
        err = re.sub(r"\b[0-9a-f]{16}\b", "HASH", err)
        assert err == f"asrkit transcribe: {message}. Name another folder.\n"
    assert changed(out) == before
    assert mine.read_text() == "my own notes"


def folder_of(names, out, owner="me"):
    """The folder of recordings of these names."""
    recordings = [(Path(name), Path(name)) for name in names]
    return Folder(out, recordings, {"owner": owner}, kind="json")


def test_a_folder_that_another_run_has_begun_takes_no_transcript_of_other_settings(
    tmp_path,
):
    names, out = ["a.wav", "b.wav"], tmp_path / "out"
    one, other = folder_of(names, out), folder_of(names, out, "others")
    one.write(Transcript(path=Path("a.wav")))
    with pytest.raises(ValueError, match="^owner: expected me, .*, got others"):
        other.write(Transcript(path=Path("b.wav")))
    assert one.todo() == other.todo() == [Path("b.wav")]


def test_a_transcript_that_cannot_be_written_is_named(tmp_path):
    folder = folder_of(["sub/a.wav"], tmp_path)
    (tmp_path / "sub").touch()
    message = (
        r"sub/a\.json cannot be written: .*\. The same command resumes from here\.$"
    )
    with pytest.raises(OSError, match=message):
        folder.write(Transcript(path=Path("sub/a.wav")))


def test_a_setting_that_the_stored_fingerprint_lacks_counts_as_changed(tmp_path):
    folder_of(["a.wav"], tmp_path).write(Transcript(path=Path("a.wav")))
    (tmp_path / ".asrkit-json").write_text('{"older": "1"}')
    with pytest.raises(ValueError, match="^owner: expected None, .*, got me"):
        folder_of(["a.wav"], tmp_path)


def test_other_files_in_the_folder_of_a_model_do_not_change_its_fingerprint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = Plan(model=tmp_path).fingerprint()
    for name in ("state.pt", "log.jsonl", ".hidden"):
        (tmp_path / name).write_text("more")
    assert Plan(model=tmp_path).fingerprint() == before
    (tmp_path / "config.json").write_text("{}")
    assert Plan(model=tmp_path).fingerprint() != before


def test_a_folder_with_an_unreadable_fingerprint_is_refused(tmp_path):
    key = tmp_path / ".asrkit-json"
    key.write_text("sha256:0123")
    with pytest.raises(ValueError, match=f"^out: .*, got {key}. Name another folder.$"):
        folder_of(["a.wav"], tmp_path)


def test_a_run_with_nothing_to_do_says_so_and_loads_no_torch(model, speech, tmp_path):
    out = tmp_path / "out"
    command = f"transcribe {speech[0]} --model {model} --no-progress --out {out}"
    assert main(command.split()) == 0
    code = """if True:
        import sys
        from asrkit.cli import main
        assert main(sys.argv[1:]) == 0
        print("torch" in sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], capture_output=True, text=True
    )
    message = f"nothing to do: 1 file done before. Transcripts: {out}\nFalse\n"
    assert (done.stdout, done.stderr) == (message, "")


ON_THIS_CPU = pytest.mark.skipif(not has_int8(), reason="needs a CPU with AVX2")


@pytest.mark.parametrize("dtype", ["float16", pytest.param("int8", marks=ON_THIS_CPU)])
def test_auto_resumes_in_the_dtype_of_the_folder(
    transducer, speech, tmp_path, typed, dtype
):
    model, out = tmp_path / "model.safetensors", tmp_path / "out"
    save_checkpoint(model, transducer)
    how = f"--model {model} --no-progress --out {out} --dtype"
    assert typed(speech[0], how, dtype)[0] == 0
    code, _, err = typed(speech[1], how, "auto")
    whole = f"int8 beside {fast_dtype()}" if dtype == "int8" else dtype
    assert (code, err.splitlines()[0]) == (0, f"dtype: {whole}")
    message = (
        f"--dtype: expected {whole}, with which {out} was begun, got float32. Name"
    )
    assert message in typed(speech[1], how, "float32")[2]


def test_auto_takes_no_damaged_dtype(model, speech, tmp_path, typed):
    how = f"--model {model} --no-progress --out {tmp_path}"
    assert typed(speech[0], how)[0] == 0
    key = tmp_path / ".asrkit-txt"
    key.write_text(json.dumps(json.loads(key.read_text()) | {"dtype": "float17"}))
    code, _, err = typed(speech[1], how)
    assert code == 2
    assert "--dtype: expected float17, with which" in err


def test_a_name_too_long_for_a_transcript_is_refused_before_the_first(tmp_path):
    longest = "a" * 236 + ".wav"
    folder_of([longest], tmp_path).write(Transcript(path=Path(longest)))
    message = (
        "^out: .* names of at most 241 bytes, got éé.*.json. Rename the recording.$"
    )
    with pytest.raises(ValueError, match=message):
        folder_of(["é" * 118 + "a.mp3"], tmp_path)


def test_the_fingerprint_of_a_model_covers_all_files_that_are_read(
    into, speech, model, tmp_path
):
    shutil.copy(model, tmp_path / "model.safetensors")
    here = ("--model", tmp_path, "--format json")
    into(tmp_path, speech[0], *here)
    (tmp_path / "README.md").touch()
    assert into(tmp_path, *speech[:2], *here)[0]["skipped"] == 1
    before = {str(Plan(model=tmp_path).fingerprint())}
    for number, name in enumerate([
        "config.json", "preprocessor_config.json", "generation_config.json", "tokenizer.json",
        "vocab.json", "added_tokens.json", "merges.txt", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "encoder.int8.onnx", "model.xml", "model.bin",
    ]):  # fmt: skip
        (tmp_path / name).write_text(str(number))
        before.add(str(Plan(model=tmp_path).fingerprint()))
    assert len(before) == 13


def test_two_recordings_of_one_name_are_refused_and_suffixes_and_folders_keep_them_apart(
    into, speech, tmp_path
):
    given, out = tmp_path / "in", tmp_path / "out"
    for name in ("a/one.wav", "b/one.wav", "b/one.flac", "b/two.wav"):
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(speech[0], given / name)
    code, err = into(out, given / "a", given / "b")
    assert code == 2
    assert "--out: expected recordings of different names" in err
    into(out, given, "--format ctm")
    for name in ("a/one", "b/one.wav", "b/one.flac", "b/two"):
        assert (out / f"{name}.ctm").read_text().startswith(f"{name} 1 ")


def test_a_failed_file_has_no_transcript_and_is_tried_again(into, speech, tmp_path):
    out, bad = tmp_path / "out", tmp_path / "bad.wav"
    bad.write_bytes(b"nothing")
    for done_before in (0, 6):
        result, err = into(out, bad, *speech)
        assert (result["files"], result["failed"], result["skipped"]) == (
            7,
            1,
            done_before,
        )
        assert str(bad) in err
        assert len(contents(out)) == 6


def test_processes_that_share_a_folder_end_with_what_one_gives(
    into, speech, tmp_path, forked
):
    into(tmp_path / "one", *speech)
    shared = tmp_path / "shared"
    started = [forked(lambda: into(shared, *speech)[0]) for _ in range(3)]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert contents(shared) == contents(tmp_path / "one")
