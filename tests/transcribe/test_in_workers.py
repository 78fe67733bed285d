"""Recordings transcribed in several workers: the texts and the order of one process, whatever is killed."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from asrkit.cli import main
from asrkit.models import save_checkpoint
from asrkit.runtime import usable_cores
from asrkit.sound_files import Sound
from asrkit.transcribe import (
    BeamOptions,
    Layout,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    transcribe,
    transcribe_in_workers,
)
from asrkit.transcribe.workers import ENDED

sys.path.append(str(Path(__file__).resolve().parent))
from waiting import running, wait_until

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
TWO = Layout(cores=((), ()), threads=1)
SMALL = WindowOptions(batch_s=4.0, readers=1)


@pytest.fixture
def talks(speech, long_file, tmp_path):
    """Fourteen recordings, of which one is long and two cannot be read."""
    folder = tmp_path / "talks"
    folder.mkdir()
    for copy in range(2):
        for path in speech:
            shutil.copy(path, folder / f"{copy}-{path.name}")
    whole = long_file.read_bytes()
    (folder / "0-text.wav").write_text("no sound")
    (folder / "1-torn.flac").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture
def slow_talks(talks):
    """The same, under names that take a while to open after `break_reading`."""
    for path in [*talks.iterdir()]:
        path.rename(talks / f"{path.stem}-slow{path.suffix}")
    return talks


@pytest.fixture
def model(learned, tmp_path):
    """The trained model as a file."""
    save_checkpoint(tmp_path / "model.safetensors", learned)
    return str(tmp_path / "model.safetensors")


def results(transcripts):
    """(name, text, seconds, words, error) of each transcript, in order."""
    return [
        (one.path.name, one.text, one.audio_s, one.words, one.error)
        for one in transcripts
    ]


def command(talks, model, *more):
    """Arguments of the command, with one thread."""
    small = "--dtype float32 --batch-seconds 2 --readers 1 --no-progress --threads 1"
    return ["transcribe", str(talks), "--model", model, *small.split(), *more]


def children(process):
    """Processes that a process has started."""
    folder = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return (
        [int(child) for child in folder.read_text().split()] if folder.exists() else []
    )


def written(out):
    """When each transcript was written; what a killed run was writing is hidden, and none."""
    paths = [path for path in out.glob("*.txt") if not path.name.startswith(".")]
    return {path.name: path.stat().st_mtime_ns for path in paths}


def test_texts_words_errors_and_order_are_those_of_one_process(
    learned, talks, long_file
):
    sounds = [
        talks,
        Sound(Path("bytes.wav"), (talks / "0-0.wav").read_bytes()),
        Sound(long_file, start_s=3.0, duration_s=4.0),
    ]
    beam = Recognizer.from_checkpoint(
        learned, PipelineConfig(search=BeamOptions(beam=4))
    )
    for options, recognizer in (
        (WindowOptions(timestamps=True), None),
        (SMALL, None),
        (SMALL, beam),
    ):
        how = {"options": options, "recognizer": recognizer}
        wanted = results(transcribe(learned, sounds, **how))
        assert len(wanted) == 16 and sum(bool(one[-1]) for one in wanted) == 2
        for layout in (Layout(threads=1), TWO):
            found = transcribe_in_workers(learned, sounds, layout, **how)
            assert results(found) == wanted


def test_a_worker_killed_in_mid_run_loses_nothing_and_is_named(
    learned, slow_talks, break_reading, capfd
):
    wanted = results(transcribe(learned, slow_talks))
    break_reading()
    found = transcribe_in_workers(learned, slow_talks, TWO, options=SMALL)
    first = next(found)
    victim = multiprocessing.active_children()[0].pid
    os.kill(victim, signal.SIGKILL)
    assert results([first, *found]) == wanted
    (line,) = capfd.readouterr().err.splitlines()
    assert f" (process {victim}) ended by signal 9; its recordings" in line


def test_a_recording_that_ends_its_process_twice_is_an_error_and_the_rest_is_transcribed(
    learned, talks, break_reading
):
    wanted = results(transcribe(learned, talks))
    for name in ("1-poison.wav", "2-odd.wav"):
        shutil.copy(talks / "1-0.wav", talks / name)
    break_reading()
    found = results(transcribe_in_workers(learned, talks, TWO, options=SMALL))
    lost = [(name, "", 0.0, (), ENDED) for name in ("1-poison.wav", "2-odd.wav")]
    assert found == sorted(wanted + lost)


def test_who_takes_no_more_results_ends_all_workers(learned, talks):
    found = transcribe_in_workers(learned, talks, TWO, options=SMALL)
    next(found)
    assert len(multiprocessing.active_children()) == 2
    found.close()
    assert not multiprocessing.active_children()


@two_cores
def test_stdout_is_that_of_one_process_and_stderr_says_what_was_chosen(
    talks, model, capsys
):
    assert main(command(talks, model)) == 1
    one = capsys.readouterr()
    assert main(command(talks, model, "--workers", "2")) == 1
    two = capsys.readouterr()
    assert two.out == one.out and two.out.count("\n") == 12
    chosen, *broken, last = two.err.splitlines()
    assert chosen == "2 workers (as asked), 1 thread each"
    assert broken == one.err.splitlines()[:2]
    assert last.startswith("12 of 14 files transcribed, 2 failed, 0 done before; ")


def test_a_number_of_workers_that_is_none_is_one_line(talks, model, capsys):
    assert main(command(talks, model, "--workers", "two")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("asrkit transcribe: --workers: expected auto, or 1 to ")


@two_cores
def test_a_folder_goes_on_where_a_killed_command_stopped_and_ends_as_one_process_does(
    slow_talks, model, learned, tmp_path, capsys, forked, break_reading
):
    out = tmp_path / "text"
    arguments = command(slow_talks, model, "--workers", "2", "--out", str(out))
    process = forked(lambda: break_reading() or main(arguments))
    wait_until(lambda: len(written(out)) >= 2)
    workers = children(process)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(workers) == 2
    wait_until(lambda: not any(map(running, workers)))
    kept = written(out)
    assert 2 <= len(kept) < 12
    assert main(arguments) == 1
    assert f"{len(kept)} done before" in capsys.readouterr().out
    found = {path.stem: path.read_text() for path in out.glob("*.txt")}
    assert found == {
        one.path.stem: f"{one.text}\n"
        for one in transcribe(learned, slow_talks)
        if not one.error
    }
    assert kept.items() <= written(out).items()
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["skipped"] == 12


@two_cores
def test_ctrl_c_ends_all_processes(slow_talks, model, tmp_path, forked, break_reading):
    arguments = command(slow_talks, model, "--workers", "2")

    def run():
        break_reading()
        # as at a terminal; a shell's background jobs ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return main(arguments)

    process = forked(run)
    wait_until((tmp_path / "stdout").exists)
    wait_until((tmp_path / "stdout").read_text)
    workers = children(process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
    process.join()
    err = (tmp_path / "stderr").read_text()
    assert process.exitcode == 130 and err.endswith("asrkit transcribe: stopped\n")
    assert "Traceback" not in err and len(workers) == 2
    assert not any(map(running, workers))
