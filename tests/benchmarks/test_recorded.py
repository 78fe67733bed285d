"""Recorded speech for whole programs: one long recording, plain texts, and word errors by parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.data import recorded_speech
from asrkit.text import wer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, read_wav
from benchmarks.programs import recorded

WORDS = st.lists(st.sampled_from("abc"), max_size=8).map(" ".join)
REFERENCES = st.lists(WORDS.filter(bool), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def speech():
    return recorded.read()


def test_the_shipped_recordings_are_files_of_their_samples(speech, tmp_path):
    known = recorded_speech()
    assert [text for _, text in speech] == [recording.text for recording in known]
    files = recorded.write(tmp_path / "short", speech[:2])
    for file, (samples, _), recording in zip(files, speech, known, strict=False):
        assert np.array_equal(read_wav(file), samples)
        assert len(samples) / RATE_HZ == pytest.approx(recording.duration_s, abs=0.01)


def test_a_long_recording_has_every_recording_once_before_any_comes_again(speech):
    samples, texts = recorded.joined(speech, 480)
    again, _ = recorded.joined(speech, 480)
    assert np.array_equal(samples, again)
    longest = (
        max(len(recording) for recording, _ in speech) / RATE_HZ + recorded.PAUSE_S
    )
    assert 480 <= len(samples) / RATE_HZ <= 480 + longest
    N = len(speech)
    orders = [texts[start : start + N] for start in range(0, len(texts) - N, N)]
    assert len(orders) > 2
    assert {*map(tuple, orders)} != {tuple(orders[0])}
    for order in orders:
        assert sorted(order) == sorted(text for _, text in speech)


def test_its_parts_are_the_recordings_with_silence_behind_each(speech):
    samples, texts = recorded.joined(speech, 30)
    by_text = {text: recording for recording, text in speech}
    start = 0
    for text in texts:
        part = by_text[text]
        assert np.array_equal(samples[start : start + len(part)], part)
        start += len(part)
        rest = samples[start : start + int(recorded.PAUSE_S * RATE_HZ)]
        start += int(np.argmax(rest != 0)) if rest.any() else len(rest)


@pytest.mark.parametrize("text, wanted", [
    ("He said: \u201cDon\u2019t \u2014 I can't!\u201d", "he said don't i can't"),
    ("ill-disposed, in 1,066", "ill disposed in 1 066"),
    ("\u2026", ""),
    ("cafe\u0301 caf\u00e9", "caf caf"),
])  # fmt: skip
def test_plain_texts_have_lower_case_letters_digits_and_apostrophes(text, wanted):
    assert recorded.plain(text) == wanted


def test_a_text_is_cut_where_the_words_of_each_part_end():
    references = ["he could wait", "no longer", "lobsters and lobsters"]
    written = "he could wade so no longer and lobsters"
    assert recorded.cut(references, written) == ["he could wade so", "no longer", "and lobsters"]  # fmt: skip
    assert recorded.cut(references, "") == ["", "", ""]


@given(REFERENCES, WORDS)
def test_errors_of_the_parts_add_up_to_those_of_the_whole(references, written):
    whole = wer([" ".join(references)], [written])
    parts = recorded.word_errors(references, [written])
    assert parts.rate == pytest.approx(whole.rate)
    assert " ".join(" ".join(recorded.cut(references, written)).split()) == written


def test_recordings_one_by_one_are_compared_one_by_one():
    found = recorded.word_errors(["a b", "c"], ["A, b!", "d c"])
    assert (found.insertions, found.units) == (1, 3)
    found = recorded.word_errors(["\u2026", "c"], ["so", "c"])  # without a plain word
    assert (found.insertions, found.units) == (1, 1)


def test_a_recording_that_comes_again_is_drawn_as_a_whole():
    references = ["a b c d", "e f g h"] * 20
    found = recorded.word_errors(references, ["a b c d e x y h " * 20])
    assert (found.rate, found.low, found.high) == (0.25, 0, 0.5)
    assert found.units == 160
