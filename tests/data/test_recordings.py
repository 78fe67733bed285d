"""The recorded speech that asrkit ships: files, words, speakers and licences."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asrkit.data import Utterances, corpora, recorded_speech
from asrkit.files import shipped
from asrkit.transcribe.bulk import manifests

FOLDER = shipped("speech")
MANIFEST = FOLDER / "manifest.jsonl"
ROWS = [json.loads(line) for line in MANIFEST.read_text().splitlines()]
NOTICE = (Path(__file__).resolve().parents[2] / "NOTICE").read_text()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_the_manifest_agrees_with_a_recording_that_decodes(row):
    path = FOLDER / row["audio_filepath"]
    assert path.name == f"{row['id']}.flac"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == row["sha256"]
    samples, rate_hz = soundfile.read(path, dtype="float32")
    assert (rate_hz, samples.ndim) == (16_000, 1)
    assert samples.size / rate_hz == row["duration"]
    assert 0.1 < np.abs(samples).max() <= 1
    assert re.fullmatch(r"[a-z']+( [a-z']+)*", row["text"])


def test_the_set_is_small_and_varied_and_complete():
    names = {path.name for path in FOLDER.iterdir()}
    sounds = {row["audio_filepath"] for row in ROWS}
    assert names == {"README.md", "manifest.jsonl"} | sounds and len(sounds) == len(
        ROWS
    )
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 3_000_000
    seconds = [row["duration"] for row in ROWS]
    assert 100 < sum(seconds) < 140 and min(seconds) < 3 and max(seconds) > 13
    genders = {row["speaker"]: row["gender"] for row in ROWS}
    assert len(genders) >= 8 and min(Counter(genders.values())[x] for x in "fm") >= 4
    assert {"test-clean", "test-other"} <= {row["split"] for row in ROWS}


def test_table_and_licences_match_the_manifest():
    text = (FOLDER / "README.md").read_text()
    table = re.findall(
        r"^\| (.*?) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+) \|$", text, re.M
    )
    parts = {}
    for row in ROWS:
        parts.setdefault(f"{row['source']} {row['split']}", []).append(row)
    assert table == [
        (part, str(len(rows)), str(len({row["speaker"] for row in rows})),
         f"{sum(row['duration'] for row in rows):.1f}", str(sum(len(row["text"].split()) for row in rows)))
        for part, rows in parts.items()
    ]  # fmt: skip
    licences = {(row["source"], row["licence"]) for row in ROWS}
    assert licences == {("LibriSpeech", "CC-BY-4.0"), ("LibriVox", "public domain")}
    about = NOTICE.partition("data/speech")[2].partition("\n\nThe ")[0]
    for name in (
        "Panayotov",
        "CC-BY-4.0",
        "licenses/by/4.0",
        "LibriVox",
        "public domain",
    ):
        assert name in about, name
        assert name.replace("CC-BY-4.0", "Attribution 4.0") in text, name


def test_recorded_speech_returns_the_rows_of_the_manifest_in_order():
    speech = recorded_speech()
    assert [recording.id for recording in speech] == [row["id"] for row in ROWS]
    for recording, row in zip(speech, ROWS, strict=True):
        assert recording.path == FOLDER / row["audio_filepath"]
        assert recording.duration_s == row["duration"]
        for name in ("text", "speaker", "gender", "split", "source", "licence"):
            assert getattr(recording, name) == row[name]
    with pytest.raises(AttributeError):
        speech[0].text = ""


def test_training_and_shards_read_the_manifest_and_the_whole_recordings():
    speech = recorded_speech()
    utterances = Utterances.load(corpora.from_manifest(MANIFEST), progress=False)
    assert utterances.ids == [each.id for each in speech]
    assert utterances.texts == [each.text for each in speech]
    assert utterances.durations == [each.duration_s for each in speech]
    sets = corpora.load([MANIFEST])
    assert [len(sets[name]) for name in ("train", "dev", "test")] == [0, 1, 16]
    planned = [*manifests.read([MANIFEST])]
    assert [each.id for each in planned] == utterances.ids
    assert [each.sound.path for each in planned] == [each.path for each in speech]
    assert [each.sound.duration_s for each in planned] == utterances.durations
    assert {each.sound.path for each in manifests.read([FOLDER])} == {
        each.path for each in speech
    }
