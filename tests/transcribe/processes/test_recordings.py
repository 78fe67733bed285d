"""Recordings transcribed by several processes: the texts and the order of one, whatever dies."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from asrkit.sound_files import Sound
from asrkit.transcribe import (
    BeamOptions,
    Layout,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    transcribe,
    transcribe_in_processes,
)
from asrkit.transcribe.processes.recordings import ENDED

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
TWO = Layout(cores=((), ()), threads=1, why="")
SMALL = WindowOptions(batch_s=4.0, readers=1)


@pytest.fixture
def faulty(break_reading):
    """Recordings whose names say so are faulty or slow."""
    break_reading()


@pytest.fixture
def talks(speech, long_file, tmp_path):
    """Twenty recordings, of which one is long and three cannot be read."""
    for copy in range(3):
        for path in speech[:5]:
            shutil.copy(path, tmp_path / f"{copy}-{path.name}")
    shutil.copy(long_file, tmp_path / "1-long.flac")
    whole = (tmp_path / "1-long.flac").read_bytes()
    (tmp_path / "0-empty.wav").touch()
    (tmp_path / "1-text.wav").write_text("no sound")
    (tmp_path / "2-torn.flac").write_bytes(whole[: len(whole) // 2])
    return tmp_path


def results(transcripts):
    """(name, text, seconds, words, error) of each transcript, in order."""
    return [
        (one.path.name, one.text, one.audio_s, one.words, one.error)
        for one in transcripts
    ]


def alone(learned, paths, **options):
    """The results of one process."""
    return results(transcribe(learned, paths, options=WindowOptions(**options)))


def test_texts_words_errors_and_order_are_those_of_one_process(learned, talks):
    for options in ({"timestamps": True}, {"batch_s": 4.0, "readers": 1}):
        wanted = alone(learned, talks, **options)
        assert len(wanted) == 19 and sum(bool(one[-1]) for one in wanted) == 3
        how = WindowOptions(**options)
        for layout in (Layout(cores=((),), threads=1, why=""), TWO):
            heard = transcribe_in_processes(learned, talks, layout, options=how)
            assert results(heard) == wanted


def test_bytes_parts_and_beams_are_heard_too(learned, speech, long_file):
    sounds = [
        Sound(Path("bytes.wav"), speech[0].read_bytes()),
        Sound(long_file, start_s=3.0, duration_s=4.0),
        speech[1],
    ]
    config = PipelineConfig(search=BeamOptions(beam=4))
    recognizer = Recognizer.from_checkpoint(learned, config)
    wanted = results(transcribe(learned, sounds, recognizer=recognizer))
    heard = transcribe_in_processes(learned, sounds, TWO, recognizer=recognizer)
    assert results(heard) == wanted and all(one[1] for one in wanted)


def test_a_process_killed_in_mid_run_loses_nothing_and_is_named(learned, talks, faulty):
    for path in [*talks.iterdir()]:
        path.rename(talks / f"{path.stem}-slow{path.suffix}")
    wanted = alone(learned, talks)
    warned = []
    heard = transcribe_in_processes(
        learned, talks, TWO, options=SMALL, warn=warned.append
    )
    first = next(heard)
    victim = multiprocessing.active_children()[0].pid
    os.kill(victim, signal.SIGKILL)
    assert results([first, *heard]) == wanted
    (line,) = warned
    assert (
        line.startswith("worker ")
        and f" (process {victim}) ended by signal 9; " in line
    )
    assert line.endswith((" transcribed again", "; it held nothing"))


def test_a_recording_that_ends_its_process_twice_is_an_error_and_the_rest_is_transcribed(
    learned, talks, faulty
):
    wanted = alone(learned, talks)
    poison = talks / "1-poison.wav"
    odd = talks / "2-odd.wav"  # an error that nothing expects ends the process too
    for path in (poison, odd):
        shutil.copy(talks / "1-0.wav", path)
    warned = []
    heard = results(
        transcribe_in_processes(learned, talks, TWO, options=SMALL, warn=warned.append)
    )
    lost = [one for one in heard if one not in wanted]
    assert lost == [(path.name, "", 0.0, (), ENDED) for path in (poison, odd)]
    assert len(heard) == len(wanted) + 2
    assert [one[0] for one in heard] == sorted(one[0] for one in heard)
    for path, why in ((poison, "signal 9"), (odd, "exit code 1")):
        assert any(f"ended by {why}" in line for line in warned)
        assert any(line.endswith(f"now with {path} alone") for line in warned)


def test_who_stops_to_listen_ends_all_processes(learned, talks):
    heard = transcribe_in_processes(learned, talks, TWO, options=SMALL)
    next(heard)
    assert multiprocessing.active_children()
    heard.close()
    assert not multiprocessing.active_children()
