import json
import os
import signal
import subprocess
import sys

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.files import LOCK
from asrkit.models import save_checkpoint
from asrkit.transcribe.folder import LOG

KILLED = """
import os, signal, sys
from asrkit.cli import main
rename, left = os.replace, iter(range(int(sys.argv[1]), -1, -1))
def replace_or_die(source, target):
    if next(left) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
os.replace = replace_or_die
main(sys.argv[2:])
"""


@pytest.fixture
def command(learned, speech, tmp_path):
    """`asrkit transcribe` of six files, the trained model and a folder to write to, which is its last argument."""
    save_checkpoint(tmp_path / "model.safetensors", learned)
    files = ["transcribe", *map(str, speech), "--model", str(tmp_path / "model.safetensors")]
    return [
        *files,
        "--batch-seconds",
        "0.3",
        "--no-progress",
        "--json",
        "--out",
        str(tmp_path / "out"),
    ]


def contents(folder):
    """Every file of a folder but the log and the lock."""
    kept = [path for path in folder.iterdir() if path.name not in (LOG, LOCK)]
    return {path.name: path.read_bytes() for path in kept}


def counts(capsys):
    """What --json prints, and what is on stderr."""
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize("format_", ["txt", "json", "srt", "vtt", "ctm"])
def test_a_file_each_is_written_and_a_second_run_skips_all(
    command, tmp_path, capsys, format_, tiny_speech
):
    assert main([*command, "--format", format_]) == 0
    first = contents(tmp_path / "out")
    assert sorted(first) == [f"{n}.{format_}" for n in range(6)] and all(first.values())
    assert counts(capsys)[0]["skipped"] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert main([*command, "--format", format_]) == 0
    said, err = counts(capsys)
    assert (said["files"], said["skipped"], said["audio_s"], err) == (6, 6, 0.0, "")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert (
        main([*command, "--format", format_, "--fresh"]) == 0 and counts(capsys)[0]["skipped"] == 0
    )


@pytest.mark.parametrize("renames", [0, 3])
def test_a_run_killed_with_signal_9_and_run_again_gives_what_one_run_gives(
    command, tmp_path, capsys, renames
):
    assert main(command) == 0
    whole = contents(tmp_path / "out")
    again = [*command[:-1], str(tmp_path / "again")]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(renames), *again],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL
    finished = [name for name in contents(tmp_path / "again") if not name.startswith(".")]
    assert (
        len(finished) == renames and len(contents(tmp_path / "again")) == renames + 1
    )  # and what it was writing
    capsys.readouterr()
    assert main(again) == 0
    assert counts(capsys)[0]["skipped"] == renames
    assert contents(tmp_path / "again") == whole


def test_other_settings_another_model_or_a_changed_recording_are_made_anew(
    command, learned, tmp_path, capsys, speech
):
    mine = tmp_path / "mine.wav"
    mine.write_bytes(speech[0].read_bytes())
    command = ["transcribe", str(mine), *command[7:]]

    def skipped(*more):
        capsys.readouterr()
        assert main([*command, *more]) == 0
        return counts(capsys)[0]["skipped"]

    assert [skipped(), skipped()] == [0, 1]
    capsys.readouterr()
    assert main([*command, "--window", "20"]) == 0
    assert counts(capsys)[1] == "1 made anew: other model, settings or recording\n"
    assert skipped("--window", "20") == 1
    capsys.readouterr()
    assert main([*command, "--language", "de"]) == 2  # nothing is made anew by what is refused
    assert "made anew" not in capsys.readouterr().err
    assert skipped("--window", "20") == 1
    assert [
        skipped("--dtype", "bfloat16"),
        skipped("--dtype", "bfloat16"),
        skipped("--dtype", "bfloat16", "--batch-seconds", "9"),
    ] == [0, 1, 1]
    assert [skipped(), skipped()] == [0, 1]
    text = (tmp_path / "out/mine.txt").read_text()
    mine.write_bytes(speech[1].read_bytes())
    assert [skipped(), skipped()] == [0, 1] and (tmp_path / "out/mine.txt").read_text() != text
    with torch.no_grad():
        for weight in learned.model.parameters():
            weight += 1e-3
    save_checkpoint(tmp_path / "model.safetensors", learned)
    with torch.no_grad():
        for weight in learned.model.parameters():
            weight -= 1e-3
    assert [skipped(), skipped()] == [0, 1]


def test_what_asrkit_did_not_write_or_somebody_edited_is_left_alone_and_reported(
    command, tmp_path, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "2.txt").write_text("my own notes")
    assert main(command) == 1
    said, err = counts(capsys)
    assert (
        said["failed"] == 1
        and "2.txt is not asrkit's or was edited since. Move it, or pass --fresh." in err
    )
    (out / "4.txt").write_text("corrected by hand")
    (out / "5.txt").unlink()
    assert main(command) == 1
    said, err = counts(capsys)
    assert (said["failed"], said["skipped"]) == (2, 3) and (out / "5.txt").exists()
    assert (out / "2.txt").read_text() == "my own notes" and (
        out / "4.txt"
    ).read_text() == "corrected by hand"
    assert main([*command, "--fresh"]) == 0 and (out / "4.txt").read_text() != "corrected by hand"


@pytest.mark.parametrize("more", [[], ["--fresh"]])
def test_a_folder_in_the_place_of_a_transcript_is_reported_and_the_others_are_made(
    command, tmp_path, capsys, more
):
    (tmp_path / "out" / "2.txt").mkdir(parents=True)
    assert main([*command, *more]) == 1
    said, err = counts(capsys)
    assert said["failed"] == 1 and f"out: {tmp_path / 'out' / '2.txt'} is no file. Move it." in err
    assert (tmp_path / "out" / "5.txt").is_file()


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(command, tmp_path, capsys):
    full = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))"
    rest = "from asrkit.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{full}; {rest}", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert " cannot be written: File too large. The same command goes on" in done.stderr
    made = contents(tmp_path / "out")
    assert 0 < len(made) < 6
    assert main(command) == 0
    assert counts(capsys)[0]["skipped"] == len(made) and len(contents(tmp_path / "out")) == 6


def test_a_torn_log_and_a_lost_one_cost_no_transcript(command, tmp_path, capsys):
    assert main(command) == 0
    log, whole = tmp_path / "out" / LOG, contents(tmp_path / "out")
    log.write_bytes(
        b"[" * 100_000 + b"\n" + log.read_bytes()[:-30]
    )  # no JSON that Python reads, and a torn line
    (tmp_path / "out/5.txt").unlink()
    assert main(command) == 0 and contents(tmp_path / "out") == whole
    capsys.readouterr()
    assert main(command) == 0 and counts(capsys)[0]["skipped"] == 6


def test_two_recordings_of_one_name_are_refused_and_folders_keep_them_apart(
    command, speech, tmp_path, capsys
):
    for name in ("a/one.wav", "b/one.flac"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(str(tmp_path / "in" / name), soundfile.read(str(speech[0]))[0], 16_000)
    rest = command[7:]
    assert main(["transcribe", str(tmp_path / "in/a"), str(tmp_path / "in/b/one.flac"), *rest]) == 2
    err = capsys.readouterr().err.strip()
    assert (
        "out: expected recordings of different names, got" in err
        and "\n" not in err
        and not (tmp_path / "out").exists()
    )
    assert main(["transcribe", str(tmp_path / "in"), *rest]) == 0
    assert (
        (tmp_path / "out/a/one.txt").read_bytes()
        == (tmp_path / "out/b/one.txt").read_bytes()
        != b""
    )
    assert main(["transcribe", str(tmp_path / "in"), *rest, "--format", "ctm"]) == 0
    assert [
        (tmp_path / f"out/{name}.ctm").read_text().split()[0] for name in ("a/one", "b/one")
    ] == ["a/one", "b/one"]


def test_a_name_too_long_for_a_transcript_is_reported_and_the_rest_is_done(
    command, speech, tmp_path, capsys
):
    long = tmp_path / ("é" * 123 + ".wav")
    long.write_bytes(speech[0].read_bytes())
    assert main([command[0], str(long), *command[1:]]) == 1
    said, err = counts(capsys)
    assert (said["failed"], len(contents(tmp_path / "out"))) == (
        1,
        6,
    ) and "is too long for a transcript. Rename" in err


def test_a_failed_file_has_no_transcript_and_is_tried_again(command, tmp_path, capsys):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"nothing")
    assert main([*command[:1], str(bad), *command[1:]]) == 1
    said, err = counts(capsys)
    assert said["failed"] == 1 and str(bad) in err and len(contents(tmp_path / "out")) == 6
    assert main([*command[:1], str(bad), *command[1:]]) == 1 and counts(capsys)[0] | {"rtfx": 0} == {
        "files": 7, "failed": 1, "skipped": 6, "audio_s": 0.0, "rtfx": 0, "out": command[-1],
    }  # fmt: skip


def test_processes_that_share_a_folder_end_with_what_one_gives(command, tmp_path, capsys):
    assert main(command) == 0
    whole = contents(tmp_path / "out")
    shared = [*command[:-1], str(tmp_path / "shared"), "--fresh"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, "-m", "asrkit", *shared], env=environment)
        for _ in range(2)
    ]
    assert [process.wait() for process in running] == [0, 0]
    assert contents(tmp_path / "shared") == whole


@pytest.mark.parametrize("format_", ["txt", "json", "ctm"])
def test_a_file_whose_name_is_no_utf_8_is_transcribed_with_the_rest(
    command, tmp_path, speech, format_
):
    odd = tmp_path / os.fsdecode(b"odd-\xff.wav")
    odd.write_bytes(speech[0].read_bytes())
    assert main(["transcribe", str(odd), *command[1:], "--format", format_]) == 0
    assert len(contents(tmp_path / "out")) == 7


def test_subtitles_without_a_folder_and_a_folder_that_is_a_file_are_refused(
    command, tmp_path, capsys
):
    assert main([*command[:-2], "--format", "srt"]) == 2
    assert (
        "format: expected txt or json without --out, got srt. Pass --out DIR."
        in capsys.readouterr().err
    )
    (tmp_path / "out").write_text("")
    assert main(command) == 2 and "out: expected a folder" in capsys.readouterr().err
