import copy
import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import soundfile

from asrkit.cli import main
from asrkit.files import LOCK
from asrkit.models import save_checkpoint
from asrkit.transcribe import Folder, Transcript, WindowOptions
from asrkit.transcribe.formats import FORMATS


@pytest.fixture
def command(learned, speech, tmp_path):
    """`asrkit transcribe` of six files, the trained model and a folder to write to, which is its last argument."""
    save_checkpoint(tmp_path / "model.safetensors", learned)
    files = [
        "transcribe",
        *map(str, speech),
        "--model",
        str(tmp_path / "model.safetensors"),
    ]
    return [
        *files,
        "--dtype",
        "float32",
        "--batch-seconds",
        "0.3",
        "--no-progress",
        "--json",
        "--out",
        str(tmp_path / "out"),
    ]


def contents(folder):
    """Every file of a folder but the lock, and the one that says what made the others."""
    kept = [path for path in folder.iterdir() if path.name not in (LOCK, ".asrkit-txt")]
    return {path.name: path.read_bytes() for path in kept}


def counts(capsys):
    """What --json prints, and what is on stderr."""
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_file_each_is_written_in_any_format_and_a_second_run_skips_all(
    command, tmp_path, capsys
):
    for format_ in FORMATS:
        assert main([*command, "--format", format_]) == 0
        assert counts(capsys)[0]["skipped"] == 0
        assert all((tmp_path / f"out/{n}.{format_}").read_bytes() for n in range(6))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert main(command) == 0
    said, err = counts(capsys)
    assert (said["files"], said["skipped"], said["audio_s"], err) == (6, 6, 0.0, "")
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()
    }


def test_a_run_killed_with_signal_9_and_run_again_gives_what_one_run_gives(
    command, tmp_path, capsys, forked
):
    renames = 4  # one of them is of what made the transcripts
    assert main(command) == 0
    whole = contents(tmp_path / "out")
    again = [*command[:-1], str(tmp_path / "again")]

    def killed():
        rename, left = os.replace, iter(range(renames, -1, -1))

        def replace_or_die(source, target):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        os.replace = replace_or_die
        main(again)

    process = forked(killed)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = [
        name for name in contents(tmp_path / "again") if not name.startswith(".")
    ]
    assert len(finished) == renames - 1
    assert len(contents(tmp_path / "again")) == renames  # and what it was writing
    capsys.readouterr()
    assert main(again) == 0
    assert counts(capsys)[0]["skipped"] == len(finished)
    assert contents(tmp_path / "again") == whole


def test_another_model_other_settings_and_files_of_others_are_refused(
    command, learned, tmp_path, capsys, speech
):
    wanted = "asrkit transcribe: --out: expected transcripts of this model and these settings, got "
    assert main(command) == 0
    assert (
        main([*command, "--batch-seconds", "9", "--readers", "2"]) == 0
    )  # change no text
    first = contents(tmp_path / "out")
    other = copy.deepcopy(learned.model)
    other.output.bias.data += 1e-3
    save_checkpoint(tmp_path / "other.safetensors", learned._replace(model=other))
    others = ["--model", str(tmp_path / "other.safetensors")]
    for more in (["--window", "20"], ["--dtype", "bfloat16"], others):
        capsys.readouterr()
        assert main([*command, *more]) == 2
        folder = tmp_path / "out"
        assert (
            capsys.readouterr().err
            == f"{wanted}those of others in {folder}. Name another folder.\n"
        )
    mine = tmp_path / "mine" / "2.txt"
    mine.parent.mkdir()
    mine.write_text("my own notes")
    assert main([*command[:-1], str(mine.parent)]) == 2
    assert capsys.readouterr().err == f"{wanted}{mine}. Name another folder.\n"
    assert contents(tmp_path / "out") == first and mine.read_text() == "my own notes"


def test_a_folder_that_others_began_meanwhile_takes_nothing_of_other_settings(
    learned, speech, tmp_path
):
    recordings = [(path, Path(path.name)) for path in speech[:2]]
    one, other = (
        Folder(tmp_path / "out", recordings, learned, windows, kind="txt")
        for windows in (WindowOptions(), WindowOptions(window_s=20))
    )
    one.write(Transcript(path=speech[0]))
    with pytest.raises(ValueError, match="^out: .* those of others in"):
        other.write(Transcript(path=speech[1]))
    one.write(Transcript(path=speech[1]))
    assert len(contents(tmp_path / "out")) == 2


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    command, tmp_path, capsys, forked
):
    command = [*command, "--format", "json"]
    assert main([*command[:-3], str(tmp_path / "all"), "--format", "json"]) == 0
    sizes = [path.stat().st_size for path in (tmp_path / "all").glob("*.json")]

    read, write = os.pipe()

    def full():
        sys.stderr = os.fdopen(write, "w")  # no file, which would be limited too
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) - 1,) * 2)
        return main(command)

    process = forked(full)
    process.join()
    err = os.read(read, 9999).decode()
    assert process.exitcode == 2 and err.count("\n") == 1
    assert " cannot be written: File too large. The same command goes on" in err
    made = [*(tmp_path / "out").glob("*.json")]
    assert 0 < len(made) < 6
    capsys.readouterr()
    assert main(command) == 0
    assert counts(capsys)[0]["skipped"] == len(made)


def test_two_recordings_of_one_name_are_refused_and_folders_keep_them_apart(
    command, speech, tmp_path, capsys
):
    for name in ("a/one.wav", "b/one.flac"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(
            str(tmp_path / "in" / name), soundfile.read(str(speech[0]))[0], 16_000
        )
    rest = command[7:]
    assert (
        main(
            [
                "transcribe",
                str(tmp_path / "in/a"),
                str(tmp_path / "in/b/one.flac"),
                *rest,
            ]
        )
        == 2
    )
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
        (tmp_path / f"out/{name}.ctm").read_text().split()[0]
        for name in ("a/one", "b/one")
    ] == ["a/one", "b/one"]


def test_a_name_too_long_for_a_transcript_is_refused_before_the_first(
    learned, tmp_path
):
    def folder(stem):
        named = [(Path("a.wav"), Path(f"{stem}.wav"))]
        return Folder(tmp_path / "out", named, learned, WindowOptions(), kind="json")

    folder("a" * 240).write(Transcript(path=Path("a.wav")))
    with pytest.raises(ValueError, match="^out: .* names of at most 245 bytes, got"):
        folder("é" * 121)


def test_a_failed_file_has_no_transcript_and_is_tried_again(command, tmp_path, capsys):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"nothing")
    assert main([*command[:1], str(bad), *command[1:]]) == 1
    said, err = counts(capsys)
    assert (
        said["failed"] == 1 and str(bad) in err and len(contents(tmp_path / "out")) == 6
    )
    assert main([*command[:1], str(bad), *command[1:]]) == 1 and counts(capsys)[0] | {"rtfx": 0} == {
        "files": 7, "failed": 1, "skipped": 6, "audio_s": 0.0, "rtfx": 0, "out": command[-1],
    }  # fmt: skip


def test_processes_that_share_a_folder_end_with_what_one_gives(
    command, tmp_path, forked
):
    assert main(command) == 0
    whole = contents(tmp_path / "out")
    shared = [*command[:-1], str(tmp_path / "shared")]
    started = [forked(lambda: main(shared)) for _ in range(3)]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert contents(tmp_path / "shared") == whole


def test_subtitles_without_a_folder_and_a_folder_that_is_a_file_are_refused(
    command, tmp_path, capsys
):
    assert main([*command[:-2], "--format", "srt"]) == 2
    assert "--format: expected --out with it, got srt." in capsys.readouterr().err
    (tmp_path / "out").write_text("")
    assert main(command) == 2 and "out: expected a folder" in capsys.readouterr().err
