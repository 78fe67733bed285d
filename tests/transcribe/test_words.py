import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asrkit.text import CharTokenizer
from asrkit.transcribe import Label, Word
from asrkit.transcribe.words import join, words

FRAME_S = 0.04
TOKENIZER = CharTokenizer()


def labels(text, start_s=0.0, step_s=0.08):
    """A label a character, evenly spaced."""
    times = [start_s + n * step_s for n in range(len(text))]
    return [
        Label(token, time, time + FRAME_S, 0.5)
        for token, time in zip(TOKENIZER.encode(text), times, strict=True)
    ]


def text_of(found):
    return TOKENIZER.decode([label.token for label in found])


@st.composite
def recordings(draw):
    """Labels of a whole recording, and what two windows of it heard: times off by up to two frames, nonsense at their edges."""
    said = draw(
        st.lists(
            st.sampled_from(
                ["one", "two", "three", "no", "on", "a", "aa", "four five"]
            ),
            min_size=8,
            max_size=40,
        )
    )
    step = draw(st.sampled_from([0.04, 0.08, 0.12]))
    truth = labels(" ".join(said), 0.2, step)
    end = truth[-1].start_s + 0.2
    start_s = draw(st.floats(0.0, max(end - 3.0, 0.0)))
    end_s = min(start_s + 3.0, end)
    shift = st.sampled_from([0, 0, 0, -1, 1, 2])
    heard = []
    for low, high in ((0.0, end_s), (start_s, end)):
        before = -1.0
        row = []
        for label in truth:
            if low <= label.start_s < high:
                before = max(before, label.start_s + draw(shift) * FRAME_S)
                row.append(label._replace(start_s=before, end_s=before + FRAME_S))
        heard.append(row)
    first, second = heard
    lost = draw(st.integers(0, 3))
    first = (
        first[: len(first) - lost] if end_s < end else first
    )  # half a word at the edge is not understood
    second = second[lost:] if start_s > 0 else second
    garbage = labels("x", max(start_s, 0.0)) if start_s > 0 else []
    return truth, first, [*garbage, *second], start_s, end_s


@settings(max_examples=300)
@given(recordings())
def test_two_windows_that_time_labels_differently_are_joined_to_what_was_said(
    recording,
):
    truth, first, second, start_s, end_s = recording
    assume(end_s - start_s > 2.9)  # else the recording is shorter than the overlap
    assert text_of(join(first, second, start_s, end_s)) == text_of(truth)


def test_what_only_one_window_has_is_kept_on_its_side_of_the_cut():
    first, second = labels("one two", 0.0), labels("nine ten", 9.0)
    assert text_of(join(first, second, 8.0, 10.0)) == "one twonine ten"
    assert (
        text_of(join(first, [], 8.0, 10.0)) == "one two"
        and text_of(join([], second, 8.0, 10.0)) == "nine ten"
    )
    assert (
        text_of(join(first, second, 9.0, 9.0)) == "one twonine ten"
    )  # windows that only touch


def test_a_word_in_the_middle_that_they_hear_differently_is_one_word_of_either():
    first = [
        *labels("x", 0.1),
        *labels("seven", 1.05, 0.1),
        *labels("x", 2.5),
    ]  # 0 to 2.6 s is the overlap, 1.3 s its middle
    second = [*labels("x", 0.1), *labels("night", 1.1, 0.1), *labels("x", 2.5)]
    assert text_of(join(first, second, 0.0, 2.6)) in ("xsevenx", "xnightx")


def test_a_word_they_split_into_other_pieces_is_not_said_in_part_and_in_whole():
    same = [
        [Label(n, n * 0.1, n * 0.1 + 0.1, 1.0) for n in part]
        for part in (range(1, 7), range(10, 16))
    ]
    first = [
        *same[0],
        Label(100, 0.7, 0.8, 1.0),
        Label(101, 0.9, 1.0, 1.0),
        *same[1],
    ]  # no pause anywhere
    second = [*same[0], Label(102, 0.8, 0.9, 1.0), *same[1]]
    joined = [label.token for label in join(first, second, 0.0, 1.6)]
    assert joined in (
        [label.token for label in first],
        [label.token for label in second],
    )


def test_the_cut_is_not_at_the_edge_of_a_pause():
    first, second = (
        labels("one", 0.0, 0.1),
        labels("ten", 1.0, 0.1),
    )  # a pause from 0.2 to 1.0 s
    late = [
        label._replace(start_s=label.start_s + 0.3) for label in labels("oxe", 0.0, 0.1)
    ]  # until 0.5 s, and not understood
    assert text_of(join(first, [*late, *second], 0.0, 1.5)) == "oneten"


def test_repeated_words_are_neither_merged_nor_doubled():
    said = "one one one one one one one one"
    truth = labels(said, 0.0, 0.2)
    late = [
        label._replace(start_s=label.start_s + 0.04)
        for label in truth
        if label.start_s >= 2.0
    ]
    assert (
        text_of(join([label for label in truth if label.start_s < 4.5], late, 2.0, 4.5))
        == said
    )


def test_words_begin_and_end_with_their_letters_and_not_with_the_space_between():
    found = words(labels(" one  two", 0.0, 0.1), TOKENIZER)
    assert [word.text for word in found] == ["one", "two"]
    assert [(word.start_s, word.end_s) for word in found] == [
        (pytest.approx(0.1), pytest.approx(0.34)),
        (pytest.approx(0.6), pytest.approx(0.84)),
    ]
    assert words([], TOKENIZER) == [] and words(labels("   "), TOKENIZER) == []


def test_a_word_is_as_sure_as_its_least_sure_label_and_ends_before_the_next():
    row = [
        Label(TOKENIZER.encode(c)[0], t, t + 1.0, p)
        for c, t, p in (
            ("a", 0.0, 0.3),
            ("b", 0.1, 0.9),
            (" ", 0.2, 0.1),
            ("c", 0.3, 0.8),
        )
    ]
    assert words(row, TOKENIZER) == [
        Word("ab", 0.0, 0.3, 0.3),
        Word("c", 0.3, 1.3, 0.8),
    ]


def test_pieces_of_a_sentencepiece_model_make_the_words_of_its_text(train_pieces):
    texts = [
        "the old cat slept behind the green river",
        "yesterday anna found the small teacher again",
        "play the radio",
    ]
    tokenizer = train_pieces(texts, vocab_size=40)
    for text in texts:
        tokens = tokenizer.encode(text)
        assert len(tokens) > len(text.split())
        found = words(
            [
                Label(token, n * 0.1, n * 0.1 + 0.1, 1.0)
                for n, token in enumerate(tokens)
            ],
            tokenizer,
        )
        assert [word.text for word in found] == text.split()
        assert all(
            one.end_s <= other.start_s + 1e-9
            for one, other in itertools.pairwise(found)
        )


@given(st.lists(st.integers(0, 27), max_size=60))
def test_the_words_are_those_of_the_text_whatever_the_labels(tokens):
    row = [Label(token, n * 0.1, n * 0.1 + 0.1, 1.0) for n, token in enumerate(tokens)]
    assert [word.text for word in words(row, TOKENIZER)] == TOKENIZER.decode(
        tokens
    ).split()


def test_labels_without_white_space_make_words_of_bounded_length_and_lose_none():
    labels = [Label(2 + n % 26, 0.1 * n, 0.1 * n + 0.1, 0.5) for n in range(200)]
    found = words(labels, CharTokenizer())
    assert [len(word.text) for word in found] == [64, 64, 64, 8]
    assert "".join(word.text for word in found) == CharTokenizer().decode(
        [label.token for label in labels]
    )
    assert [word.start_s for word in found] == [
        labels[n].start_s for n in (0, 64, 128, 192)
    ]
    labels[64:66] = [
        label._replace(token=0) for label in labels[64:66]
    ]  # spaces, just there
    assert [len(word.text) for word in words(labels, CharTokenizer())] == [
        64,
        64,
        64,
        6,
    ]
