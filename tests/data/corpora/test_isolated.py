"""Isolated synthetic digits: what is said, by whom, and that they are to train on only."""

import json
from functools import partial

import numpy as np
import pytest
import soundfile

from asrkit.data import corpora
from asrkit.data.corpora import isolated, synthetic

WORDS = synthetic.DIGITS.split("|")


@pytest.fixture
def six(a_home):
    """Six of them, in a home of their own."""
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    return list(corpora.isolated_digits(count=6, progress=False))


def test_words_are_said_by_an_english_and_by_a_foreign_voice_in_turn_without_silence(six):
    said = [cut.supervisions[0] for cut in six]
    assert [supervision.text for supervision in said] == [WORDS[n // 2] for n in range(6)]
    languages = [supervision.speaker.partition("+")[0] for supervision in said]
    assert set(languages[::2]) <= set(synthetic.ACCENTS)
    assert set(languages[1::2]) <= set(isolated.RESPELLED)
    for cut in six:
        samples = np.abs(cut.load_audio()[0])
        assert 0.1 < cut.duration < 1.5 and len(samples) == cut.num_samples
        loud = np.flatnonzero(samples > isolated.SPEECH_LEVEL * samples.max())
        margin = round(isolated.MARGIN_S * cut.sampling_rate)
        assert loud[0] <= margin and len(samples) - loud[-1] <= margin + 1


def test_every_digit_is_said_equally_often_and_no_voice_of_dev_or_test_speaks():
    jobs = [isolated._job(n, 0) for n in range(400)]
    heard = [(job["voice"], job["variant"]) for job in jobs]
    kept = synthetic.voices_of_splits()
    for split in ("dev", "test"):
        assert not {(voice["voice"], voice["variant"]) for voice in kept[split]} & set(heard)
    english = [job["text"] for job in jobs[::2]]
    assert all(english.count(word) == 20 for word in WORDS)
    assert len(set(heard[1::2])) > 90  # 140 foreign voices
    assert isolated._job(7, 0) == isolated._job(7, 0) != isolated._job(7, 1)
    assert all(len(words.split()) == 10 for words in isolated.RESPELLED.values())


def test_they_are_to_train_on_only(six, tmp_path, monkeypatch):
    few = partial(corpora.isolated_digits, count=6)
    monkeypatch.setattr(corpora, "isolated_digits", few)
    soundfile.write(tmp_path / "a.wav", np.full(1600, 0.1), 16_000)
    manifest = tmp_path / "cuts.jsonl"
    manifest.write_text(json.dumps({"audio": "a.wav", "text": "one", "speaker": "ann"}))
    sets = corpora.load(["isolated_digits", manifest], hold_out="ann", progress=False)
    assert {split: len(cuts) for split, cuts in sets.items()} == {"train": 6, "dev": 0, "test": 1}
    cuts, added = corpora.load_by_speaker([manifest, "isolated_digits"], progress=False)
    assert len(cuts) == 1 and [cut.id for cut in added] == [cut.id for cut in six]


def test_a_count_that_is_none_is_refused():
    with pytest.raises(ValueError, match="count: expected a whole number from 1 up, got 0"):
        corpora.isolated_digits(count=0)
