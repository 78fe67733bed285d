"""Recordings transcribed by several processes: the texts and the order of one, whatever dies."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.models import Checkpoint, CTCConfig, CTCModel, FastConformerConfig
from asrkit.sound_files import Sound
from asrkit.text import CharTokenizer
from asrkit.transcribe import (
    BeamOptions,
    Layout,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    transcribe,
    transcribe_in_processes,
)
from asrkit.transcribe.processes import process_memory
from asrkit.transcribe.processes.recordings import ENDED

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no process")
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
    return [(one.path.name, one.text, one.audio_s, one.words, one.error) for one in transcripts]


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


def test_real_recordings_have_the_texts_of_one_process(learned, shared_speech):
    paths = [
        *sorted((shared_speech / "audio/fsdd").glob("*_theo_*.wav"))[:8],
        *sorted((shared_speech / "audio/librispeech").glob("*.flac"))[:2],
    ]
    wanted = [(one.path, one.text, one.audio_s) for one in transcribe(learned, paths)]
    heard = transcribe_in_processes(learned, paths, TWO, options=SMALL)
    assert [(one.path, one.text, one.audio_s) for one in heard] == wanted
    assert all(text for _, text, _ in wanted)


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


def test_nothing_to_transcribe_starts_nothing(learned):
    assert [*transcribe_in_processes(learned, [], TWO)] == []


def test_what_the_model_cannot_do_is_said_before_a_process_starts(learned, speech):
    with pytest.raises(ValueError, match="^batch_s: expected more than 0"):
        next(transcribe_in_processes(learned, speech, TWO, options=WindowOptions(batch_s=0)))


def test_a_process_killed_in_mid_run_loses_nothing_and_is_named(learned, talks, faulty):
    for path in [*talks.iterdir()]:
        path.rename(talks / f"{path.stem}-slow{path.suffix}")
    wanted = alone(learned, talks)
    told = []
    heard = transcribe_in_processes(learned, talks, TWO, options=SMALL, tell=told.append)
    first = next(heard)
    victim = multiprocessing.active_children()[0].pid
    os.kill(victim, signal.SIGKILL)
    assert results([first, *heard]) == wanted
    (line,) = told
    assert line.startswith("worker ") and f" (process {victim}) ended by signal 9; " in line
    assert line.endswith((" transcribed again", "; it held nothing"))


def test_a_recording_that_ends_its_process_twice_is_an_error_and_the_rest_is_heard(
    learned, talks, faulty
):
    wanted = alone(learned, talks)
    poison = talks / "1-poison.wav"
    shutil.copy(talks / "1-0.wav", poison)
    told = []
    heard = results(transcribe_in_processes(learned, talks, TWO, options=SMALL, tell=told.append))
    assert [one for one in heard if one[0] != poison.name] == wanted
    (lost,) = [one for one in heard if one[0] == poison.name]
    assert lost[1:] == ("", 0.0, (), ENDED)
    assert [one[0] for one in heard] == sorted(one[0] for one in heard)
    assert len(told) == 2 and "signal 9" in told[0] and told[1].endswith(f"now with {poison} alone")


def test_recordings_that_nothing_expects_or_that_hang_are_errors_and_the_rest_is_heard(
    learned, talks, faulty, capfd
):
    for long in ("1-long.flac", "2-torn.flac"):  # would take longer than it takes to hang
        (talks / long).unlink()
    wanted = alone(learned, talks)
    for name in ("0-hang.wav", "1-odd.wav"):
        shutil.copy(talks / "1-0.wav", talks / name)
    told = []
    options = WindowOptions(batch_s=0.1, readers=1)
    heard = results(
        transcribe_in_processes(learned, talks, TWO, options=options, tell=told.append, hang_s=2.0)
    )
    lost = {one[0]: one[1:] for one in heard if one not in wanted}
    assert lost == dict.fromkeys(("0-hang.wav", "1-odd.wav"), ("", 0.0, (), ENDED))
    assert len(heard) == len(wanted) + 2
    assert [one[0] for one in heard] == sorted(one[0] for one in heard)
    ends = [line.split(" ended by ")[1].split("; ")[0] for line in told]
    alone_too = f", now with {talks}/1-odd.wav alone"
    assert sorted(ends) == sorted(
        [
            "KeyError: 'no such header'",
            f"KeyError: 'no such header'{alone_too}",
            "signal 9, after 2.8 s without a result",
            f"signal 9, after 2.8 s without a result, now with {talks}/0-hang.wav alone",
        ]
    )
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan")])
def test_a_time_to_wait_that_cannot_be_is_one_line(learned, speech, wrong):
    with pytest.raises(ValueError, match="^hang_s: expected more than 0 seconds, got"):
        next(transcribe_in_processes(learned, speech, TWO, hang_s=wrong))


def test_who_stops_to_listen_ends_all_processes(learned, talks):
    heard = transcribe_in_processes(learned, talks, TWO, options=SMALL)
    next(heard)
    assert multiprocessing.active_children()
    heard.close()
    assert not multiprocessing.active_children()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup here")
def test_the_weights_of_a_prepared_model_are_in_memory_once(speech):
    encoder = FastConformerConfig(width=1024, layers=4, heads=8, subsampling_channels=32)
    model = CTCModel(CTCConfig(vocab_size=28, encoder=encoder)).eval()
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    checkpoint = Checkpoint(model, CharTokenizer(), {}, {})
    recognizer = Recognizer.from_checkpoint(checkpoint, in_place=True)
    heard = transcribe_in_processes(
        checkpoint, speech, TWO, options=WindowOptions(batch_s=1.0), recognizer=recognizer
    )
    next(heard)
    own = [process_memory(child.pid)["own"] for child in multiprocessing.active_children()]
    assert all(one.error == "" for one in heard)
    assert len(own) == 2 and weights > 300 * 2**20
    assert max(own) < weights / 2


def test_a_bar_counts_the_seconds_of_all_processes(learned, speech, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert len([*transcribe_in_processes(learned, speech, TWO, progress=True)]) == 6
    err = capsys.readouterr().err
    whole_s = round(sum(soundfile.info(str(path)).duration for path in speech))
    assert f"{whole_s} of {whole_s} s" in err and "RTFx" in err


def test_torch_has_the_threads_it_had(learned, speech):
    before = torch.get_num_threads()
    assert len([*transcribe_in_processes(learned, speech, TWO)]) == 6
    assert torch.get_num_threads() == before
