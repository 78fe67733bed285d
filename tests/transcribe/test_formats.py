import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.transcribe import Transcript
from asrkit.transcribe.formats import (
    FORMATS,
    LINE,
    LINES,
    PAUSE_S,
    cues,
    render,
)
from asrkit.transcribe.words import Word

SAID = (
    Word("good", 59.9996, 60.2, 0.9),
    Word("morning", 60.3, 60.7, 0.8),
    Word("<you>", 3661.5, 3661.9, 0.75),
)
PATH = Path("some where/a b.wav")
ONE = Transcript(path=PATH, text="good morning <you>", audio_s=3662.25, words=SAID)


RENDERED = {
    "srt": "1\n00:01:00,000 --> 00:01:01,000\ngood morning\n\n"
    "2\n01:01:01,500 --> 01:01:02,250\n<you>\n",
    "vtt": "WEBVTT\n\n1\n00:01:00.000 --> 00:01:01.000\ngood morning\n\n"
    "2\n01:01:01.500 --> 01:01:02.250\n&lt;you&gt;\n",
    "ctm": "a_b 1 60.000 0.200 good 0.900\na_b 1 60.300 0.400 morning 0.800\n"
    "a_b 1 3661.500 0.400 <you> 0.750\n",
}


@pytest.mark.parametrize("kind", RENDERED)
def test_words_with_times_are_written_as_the_format_has_them(kind):
    assert render(ONE, kind) == RENDERED[kind]


def test_json_has_words_and_a_language_where_there_are_some():
    read = json.loads(render(replace(ONE, language="de"), "json"))
    assert [*read] == ["file", "text", "audio_s", "language", "words"]
    word = {"word": "good", "start_s": 60.0, "end_s": 60.2, "confidence": 0.9}
    assert read["words"][0] == word
    plain = Transcript(path=Path("a"), text="é", audio_s=1.0)
    assert render(plain, "json") == '{"file": "a", "text": "é", "audio_s": 1.0}\n'


def test_nothing_said_makes_a_valid_file_of_each_format():
    empty = Transcript(path=PATH, audio_s=1.0)
    texts = [render(empty, kind) for kind in FORMATS if kind != "json"]
    assert texts == ["\n", "", "WEBVTT\n", ""]


LETTERS = ["a", "b-c", "seven", "d" * 30, "e" * 42, "f" * 43, "g" * 100]


@st.composite
def talks(draw):
    """Words of up to a hundred letters in order of time, with pauses."""
    time, found = 0.0, []
    for text in draw(st.lists(st.sampled_from(LETTERS), max_size=40)):
        time += draw(st.sampled_from([0.0, 0.05, 0.3, 1.0, 5.0]))
        end = time + draw(st.sampled_from([0.0, 0.2, 0.5]))
        found.append(Word(text, time, end, 1.0))
        time = end
    return found


@given(talks())
def test_cues_are_short_enough_do_not_overlap_and_hold_every_letter(said):
    end_s = said[-1].end_s if said else 0.0  # of the recording
    shown = cues(said, end_s)
    letters = "".join(word.text for word in said)
    assert "".join("".join(text.split()) for _, _, text in shown) == letters
    for start, end, text in shown:
        assert start < end <= end_s + 0.0011
        assert text.count("\n") < LINES
        assert max(map(len, text.splitlines())) <= LINE
    for (start, end, _), (following, _, _) in itertools.pairwise(shown):
        assert start <= following
        assert end <= following + 0.0011


def test_a_cue_ends_at_a_long_pause_or_when_it_was_shown_for_long():
    def texts(starts, long_s):
        words = [Word("a", start, start + long_s, 1.0) for start in starts]
        said = cues(words, 1e6)
        return [text for *_, text in said]

    quick = [n * 0.125 for n in range(6)]
    later = [start + PAUSE_S for start in quick]
    assert texts(quick, 0.125) == ["a a a a a a"]
    assert texts([*quick[:3], *later[3:]], 0.125) == ["a a a"] * 2
    slow = texts([n * 0.5 for n in range(30)], 0.5)
    assert [text.count("a") for text in slow] == [14, 14, 2]  # of 7 s
