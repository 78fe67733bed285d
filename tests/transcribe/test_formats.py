import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from asrkit.transcribe import FORMATS, Transcript, Word, render
from asrkit.transcribe.formats import LINE, LINES, LONGEST_S, PAUSE_S, cues

SAID = [
    Word("good", 1.0, 1.2, 0.9),
    Word("morning", 1.3, 1.7, 0.8),
    Word("<you>", 3661.5, 3661.9, 0.75),
]
ONE = Transcript(
    path=Path("some where/a b.wav"),
    text="good morning <you>",
    audio_s=3662.0,
    compute_s=1.0,
    words=tuple(SAID),
)


def test_subrip_has_numbers_commas_and_a_blank_line_between_cues():
    assert render(ONE, "srt") == (
        "1\n00:00:01,000 --> 00:00:02,000\ngood morning\n\n2\n01:01:01,500 --> 01:01:02,500\n<you>\n"
    )  # fmt: skip


def test_webvtt_has_its_header_points_and_no_tags():
    assert render(ONE, "vtt") == (
        "WEBVTT\n\n00:00:01.000 --> 00:00:02.000\ngood morning\n\n01:01:01.500 --> 01:01:02.500\n&lt;you&gt;\n"
    )


def test_ctm_has_name_channel_start_duration_word_and_confidence():
    assert render(ONE, "ctm").splitlines() == [
        "a_b 1 1.000 0.200 good 0.900", "a_b 1 1.300 0.400 morning 0.800", "a_b 1 3661.500 0.400 <you> 0.750",
    ]  # fmt: skip
    assert render(ONE, "ctm", name="a b/c").startswith("a_b/c 1 ")


def test_json_has_words_where_there_are_some_and_nothing_that_differs_from_run_to_run():
    read = json.loads(render(ONE, "json"))
    assert read["words"][0] == {
        "word": "good",
        "start_s": 1.0,
        "end_s": 1.2,
        "confidence": 0.9,
    }
    assert [*read] == ["file", "text", "audio_s", "words"]
    assert [
        *json.loads(render(Transcript(path=Path("a"), text="é", audio_s=1.0), "json"))
    ] == [
        "file",
        "text",
        "audio_s",
    ]


def test_nothing_said_makes_a_valid_file_of_each_format():
    empty = Transcript(path=Path("a.wav"), audio_s=1.0)
    assert [render(empty, kind) for kind in FORMATS if kind != "json"] == [
        "\n",
        "",
        "WEBVTT\n",
        "",
    ]


@st.composite
def talks(draw):
    """Words of up to a hundred letters in order of time, with pauses."""
    time, found = 0.0, []
    for text in draw(
        st.lists(
            st.sampled_from(
                ["a", "b-c", "seven", "d" * 30, "e" * 42, "f" * 43, "g" * 100]
            ),
            max_size=40,
        )
    ):
        time += draw(st.sampled_from([0.0, 0.05, 0.3, 1.0, 5.0]))
        end = time + draw(st.sampled_from([0.0, 0.2, 0.5]))
        found.append(Word(text, time, end, 1.0))
        time = end
    return found


@given(talks())
def test_cues_are_short_enough_do_not_overlap_and_hold_every_letter(said):
    shown = cues(said)
    assert re.sub(r"\s", "", "".join(text for _, _, text in shown)) == "".join(
        word.text for word in said
    )
    for start, end, text in shown:
        assert (
            end > start
            and text.count("\n") < LINES
            and max(map(len, text.splitlines())) <= LINE
        )
    starts = [start for start, _, _ in shown]
    assert starts == sorted(starts)
    assert all(
        end <= start + 0.0011
        for (_, end, _), start in zip(shown, starts[1:], strict=False)
    )


def test_a_cue_ends_at_a_long_pause_or_when_it_was_shown_for_long():
    quick = [Word("word", n * 0.1, n * 0.1 + 0.1, 1.0) for n in range(8)]
    assert len(cues(quick)) == 1
    later = [
        word._replace(start_s=word.start_s + PAUSE_S, end_s=word.end_s + PAUSE_S)
        for word in quick[4:]
    ]
    assert [text for *_, text in cues([*quick[:4], *later])] == [
        "word word word word"
    ] * 2
    slow = [Word("a", n * 0.5, n * 0.5 + 0.5, 1.0) for n in range(30)]
    assert (
        all(end - start <= LONGEST_S for start, end, _ in cues(slow))
        and len(cues(slow)) == 3
    )
