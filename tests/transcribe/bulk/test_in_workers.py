"""Recordings transcribed in several workers: the texts and the order of one process, also after kills."""

import multiprocessing
import os
import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import soundfile
from waiting import running, wait_until

from asrkit.sound_files import Sound
from asrkit.threads import usable_cores
from asrkit.transcribe import (
    BeamOptions,
    Layout,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    transcribe,
    transcribe_in_workers,
)
from asrkit.transcribe.bulk import in_workers
from asrkit.transcribe.bulk.workers import ENDED

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
TWO = Layout(cores=((), ()), threads=1)
SMALL = WindowOptions(batch_s=4.0, readers=1)


@pytest.fixture
def talks(speech, long_file, tmp_path):
    """Eight recordings, of which two cannot be read."""
    folder = tmp_path / "talks"
    folder.mkdir()
    for path in speech:
        shutil.copy(path, folder)
    (folder / "text.wav").write_text("no sound")
    (folder / "torn.flac").write_bytes(long_file.read_bytes()[:50_000])
    return folder


def results(transcripts):
    """(name, text, seconds, times of words, error) of each transcript, in order."""
    return [
        (
            one.path.name,
            one.text,
            one.audio_s,
            tuple(word[:3] for word in one.words),  # other batches round confidences
            one.error,
        )
        for one in transcripts
    ]


# Options of the command, with one thread.
ONE_THREAD = "--batch-seconds 2 --readers 1 --no-progress --threads 1"


def test_texts_words_errors_and_order_are_those_of_one_process(
    learned, talks, long_file
):
    sounds = [
        talks,
        Sound(Path("bytes.wav"), (talks / "0.wav").read_bytes()),
        Sound(long_file, start_s=3.0, duration_s=4.0),
    ]
    config = PipelineConfig(search=BeamOptions(beam=4))
    beam = Recognizer.from_checkpoint(learned, config)
    cases = ((WindowOptions(timestamps=True), None), (SMALL, beam))
    for options, recognizer in cases:
        how = {"options": options, "recognizer": recognizer}
        wanted = results(transcribe(learned, sounds, **how))
        assert len(wanted) == 10
        assert sum(bool(one[-1]) for one in wanted) == 2
        for layout in (Layout(threads=1), TWO):
            found = transcribe_in_workers(learned, sounds, layout, **how)
            assert results(found) == wanted


def test_a_killed_worker_loses_nothing_and_what_ends_its_process_twice_is_an_error(
    learned, talks, break_reading, capfd
):
    (talks / "0.wav").rename(talks / "0-once.wav")
    wanted = results(transcribe(learned, talks))
    lost = [(name, "", 0.0, (), ENDED) for name in ("8-poison.wav", "9-odd.wav")]
    for name, *_ in lost:
        shutil.copy(talks / "1.wav", talks / name)
    break_reading()
    found = results(transcribe_in_workers(learned, talks, TWO, options=SMALL))
    assert found == sorted(wanted + lost)
    output = capfd.readouterr().err
    assert re.search(
        r"worker \d \(process \d+\) ended by signal 9; its recordings", output
    )


def test_the_total_of_the_bar_is_estimated_from_finished_jobs(
    learned, long_file, tmp_path, monkeypatch
):
    samples, rate = soundfile.read(str(long_file))
    for number in range(12):
        path = tmp_path / f"{number}.wav"
        soundfile.write(str(path), samples[: 30 * rate], rate)
    totals = []

    class Bar:
        n = 1e6  # progress that nobody uses

        def update(self, audio_s):
            pass

        def __setattr__(self, name, value):
            totals.append(value)

    monkeypatch.setattr(in_workers, "progress_bar", lambda *a, **k: nullcontext(Bar()))
    options = WindowOptions(batch_s=30, readers=1)
    list(transcribe_in_workers(learned, tmp_path, TWO, options=options))
    assert len(totals) > 4
    assert {*totals} == {360}


def test_closing_the_generator_ends_all_workers(learned, talks):
    others = {*multiprocessing.active_children()}  # of other tests
    found = transcribe_in_workers(learned, talks, TWO, options=SMALL)
    next(found)
    assert len({*multiprocessing.active_children()} - others) == 2
    found.close()
    assert not {*multiprocessing.active_children()} - others


@two_cores
def test_stdout_is_that_of_one_process_and_stderr_names_the_layout(talks, typed):
    code, one, one_err = typed(talks, ONE_THREAD)
    again, two, err = typed(talks, ONE_THREAD, "--workers 2")
    assert code == again == 1
    assert two == one
    assert (
        two.count("\n") == 7
    )  # with what comes before the place where one file is torn
    chosen, *broken, last = err.splitlines()
    assert chosen == "2 workers (as requested), 1 thread each"
    assert broken == one_err.splitlines()[:2]
    wanted = "6 of 8 files transcribed, 2 failed (1 after some text), 0 done before; "
    assert last.startswith(wanted)


@two_cores
def test_ctrl_c_ends_all_processes(talks, typed, tmp_path, forked, break_reading):
    shutil.copy(talks / "0.wav", talks / "9-stuck.wav")

    def run():
        break_reading()
        # as at a terminal; a shell's background jobs ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return typed(talks, ONE_THREAD, "--workers 2")[0]

    process = forked(run)
    wait_until((tmp_path / "stdout").exists)
    wait_until((tmp_path / "stdout").read_text)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = [*map(int, children.read_text().split())]
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
    process.join()
    err = (tmp_path / "stderr").read_text()
    assert process.exitcode == 130
    output = "With --out, the same command resumes: what is done is kept."
    assert err.endswith(f"asrkit transcribe: stopped. {output}\n")
    assert "Traceback" not in err
    assert len(workers) == 2
    assert not any(map(running, workers))
