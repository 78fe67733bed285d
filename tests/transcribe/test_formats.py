import itertools
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.transcribe import Transcript
from asrkit.transcribe.formats import FORMATS, PAUSE_S, cues, render
from asrkit.transcribe.words import Label, Word, join, words

WORDS = (
    Word("good", 59.9996, 60.2, 0.9),
    Word("morning", 60.3, 60.7, 0.8),
    Word("<you>", 3661.5, 3661.9, 0.75),
)
PATH = Path("some where/a b.wav")
ONE = Transcript(path=PATH, text="good morning <you>", audio_s=3662.25, words=WORDS)


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


def test_json_has_words_and_a_language_if_there_are_any():
    read = json.loads(render(replace(ONE, language="de"), "json"))
    assert [*read] == ["file", "text", "audio_s", "language", "words"]
    word = {"word": "good", "start_s": 60.0, "end_s": 60.2, "confidence": 0.9}
    assert read["words"][0] == word
    plain = Transcript(path=Path("a"), text="é", audio_s=1.0)
    assert render(plain, "json") == '{"file": "a", "text": "é", "audio_s": 1.0}\n'


def test_an_empty_transcript_is_a_valid_file_of_each_format():
    empty = Transcript(path=PATH, audio_s=1.0)
    texts = [render(empty, kind) for kind in FORMATS if kind != "json"]
    assert texts == ["\n", "", "WEBVTT\n", ""]


def too_long(line):
    """Whether a line is longer than Netflix's guides for its script allow."""
    wide = sum(unicodedata.east_asian_width(letter) in "FW" for letter in line)
    if any("HIRAGANA" in name or "KATAKANA" in name for name in names(line)):
        return wide + (len(line) - wide) / 2 > 13
    return wide + (len(line) - wide) / 2 > 16 if wide else len(line) > 42


def names(line):
    return [unicodedata.name(letter, "") for letter in line]


def check_cues(shown, audio_s, text):
    """Check that cues have the whole text in short enough lines, and valid times."""
    bare = "".join("".join(cue.split()) for _, _, cue in shown)
    assert bare == "".join(text.split())
    shortest_s = min(0.3, audio_s / len(shown)) if shown else 0.3
    for start, end, cue in shown:
        assert -1e-9 <= start <= end - shortest_s + 0.0011
        assert end <= min(start + 7, audio_s) + 0.0011
        assert len(cue.splitlines()) <= 2
        assert not any(map(too_long, cue.splitlines())), cue
    for (_, end, _), (following, _, _) in itertools.pairwise(shown):
        assert end <= following


LETTERS = ["a", "b-c", "seven", "d" * 30, "e" * 42, "f" * 43, "g" * 100,
           "你", "我们，", "カタ", "中" * 17, "か" * 80, "한국어" * 6, "AI的"]  # fmt: skip
GAPS_S = [0.0, 0.05, 0.3, 1.0, 5.0]


@st.composite
def talks(draw):
    """Words of up to a hundred letters in order of time, with pauses."""
    time, found = 0.0, []
    for text in draw(st.lists(st.sampled_from(LETTERS), max_size=40)):
        time += draw(st.sampled_from(GAPS_S))
        end = time + draw(st.sampled_from([0.0, 0.2, 0.5, 9.0]))
        found.append(Word(text, time, end, 1.0, draw(st.booleans())))
        time = end
    return found


@given(talks(), st.sampled_from([0.01, 0.3, 2.0]))
def test_cues_are_short_enough_do_not_overlap_and_hold_every_letter(spoken, rest_s):
    audio_s = (spoken[-1].end_s if spoken else 0.0) + rest_s
    text = "".join(word.text for word in spoken)
    check_cues(cues(spoken, audio_s), audio_s, text)


CHUNKS = ["one", " two", " seven,", "你好", "我们。", "「はい」", "きょう", " 한국어", "ไทย", "é",
          "😀", "3.5", "，", " ", "鬱", "x" * 70]  # fmt: skip
CUE = r"^\d+\n(\S+) --> (\S+)\n(.+?)\n(?:\n|\Z)"


@pytest.fixture(scope="module")
def bytewise(train_pieces):
    """A tokenizer that writes rare characters, such as 鬱, in bytes."""
    texts = [
        "one two seven, x 3.5",
        "你好我们。",
        "「はい」きょう",
        "한국어 ไทย",
        "，",
    ] * 9
    return train_pieces(
        texts, 300, byte_fallback=True, normalization_rule_name="identity"
    )


def seconds(clock):
    hours, minutes, rest = clock.replace(",", ".").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)


@given(
    st.lists(st.tuples(st.sampled_from(CHUNKS), st.sampled_from(GAPS_S)), max_size=40),
    st.lists(st.integers(-4, 4), min_size=1, max_size=9),
    st.floats(0, 1),
)
def test_text_and_times_of_every_format_are_in_order_and_whole(
    bytewise, chunks, shifts, seam
):
    truth, gaps = [], dict(enumerate(itertools.accumulate(gap for _, gap in chunks)))
    for number, (chunk, _) in enumerate(chunks):
        for token in bytewise.encode(chunk):
            time = 0.08 * len(truth) + gaps[number]
            truth.append(Label(token, time, time + 0.04, 0.5))
    audio_s = truth[-1].start_s + 0.5 if truth else 1.0
    start_s = seam * max(audio_s - 4, 0)
    shift_s = itertools.cycle(0.04 * shift for shift in shifts)
    window, before = [], start_s
    for label in truth:
        if label.start_s >= start_s:
            before = max(before, label.start_s + next(shift_s))
            window.append(label._replace(start_s=before, end_s=before + 0.04))
    first = [label for label in truth if label.start_s < start_s + 4]
    labels = join(first, window, start_s, start_s + 4)
    starts = [label.start_s for label in labels]
    assert starts == sorted(starts)

    text = bytewise.decode([label.token for label in labels])
    found = words(labels, bytewise)
    written = "".join(" " * (not word.joined) + word.text for word in found)
    assert written.split() == text.split()  # no U+FFFD that is not in the text
    spoken = Transcript(path=PATH, text=text, audio_s=audio_s, words=tuple(found))
    for kind in ("srt", "vtt"):
        shown = re.findall(CUE, render(spoken, kind), re.MULTILINE | re.DOTALL)
        check_cues(
            [(seconds(a), seconds(b), cue) for a, b, cue in shown], audio_s, text
        )
    rows = [line.split() for line in render(spoken, "ctm").splitlines()]
    timed = [(float(row[2]), float(row[2]) + float(row[3]), row[4]) for row in rows]
    listed = json.loads(render(spoken, "json")).get("words", [])
    for rows in (
        timed,
        [(row["start_s"], row["end_s"], row["word"]) for row in listed],
    ):
        assert [word for *_, word in rows] == [word.text for word in found]
        times = [time for start, end, _ in rows for time in (start, end)]
        assert all(a <= b + 1e-6 for a, b in itertools.pairwise([0.0, *times]))


def test_chinese_is_cut_at_pauses_and_full_lines():
    starts = [0.25 * n for n in range(40)]  # 32 fill two lines
    starts += [start + 12 for start in starts[:8]]
    line = [Word("中", start, start + 0.2, 1.0, True) for start in starts]
    row = "中" * 16
    assert cues(line, 15.0) == [
        (0.0, 6.95, "中" * 16 + "\n" + "中" * 12),  # of 7 s
        (7.0, 9.95, "中" * 12),
        (12.0, 13.95, "中" * 8),
    ]
    fast = [word._replace(start_s=n / 8, end_s=n / 8) for n, word in enumerate(line)]
    assert cues(fast, 9.0) == [(0.0, 3.875, f"{row}\n{row}"), (4.0, 5.875, row)]


def test_a_word_longer_than_a_line_divides_its_time_among_its_letters():
    spoken = [Word("a", 0.5, 1.0, 1.0), Word("d" * 100, 1.0, 6.0, 1.0)]
    (start, end, first), (later, last, rest) = cues(spoken, 20.0)
    assert (first, rest) == ("a " + "d" * 40 + "\n" + "d" * 42, "d" * 18)
    assert [start, end, later, last] == pytest.approx([0.5, 5.1, 5.1, 6.1])


def test_a_cue_is_shown_for_long_enough_to_be_seen():
    end = Word("end", 19.95, 20.0, 1.0)
    assert cues([end], 20.0) == [(19.7, 20.0, "end")]
    quick = [Word("a", 0.0, 0.0, 1.0), Word("b", 0.1, 8.0, 1.0)]
    assert cues(quick, 20.0) == [(0.0, 0.3, "a"), (0.3, 7.3, "b")]


def test_times_of_ctm_do_not_overlap_for_being_rounded():
    words = Word("a", 1.0006, 1.5014, 1.0), Word("b", 1.5014, 1.6, 1.0)
    rows = render(replace(ONE, words=words), "ctm").splitlines()
    assert rows == ["a_b 1 1.001 0.500 a 1.000", "a_b 1 1.501 0.099 b 1.000"]


def test_a_cue_ends_at_a_long_pause_or_when_it_was_shown_for_long():
    def texts(starts, long_s):
        words = [Word("a", start, start + long_s, 1.0) for start in starts]
        spoken = cues(words, 1e6)
        return [text for *_, text in spoken]

    quick = [n * 0.125 for n in range(6)]
    later = [start + PAUSE_S for start in quick]
    assert texts(quick, 0.125) == ["a a a a a a"]
    assert texts([*quick[:3], *later[3:]], 0.125) == ["a a a"] * 2
    slow = texts([n * 0.5 for n in range(30)], 0.5)
    assert [text.count("a") for text in slow] == [14, 14, 2]  # of 7 s
