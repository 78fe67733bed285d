import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asrkit.text import CharTokenizer
from asrkit.transcribe.words import Label, Word, join, words

FRAME_S = 0.04
TOKENIZER = CharTokenizer()


def row(tokens, start_s=0.0, step_s=0.1, length_s=0.1):
    """Labels, evenly spaced."""
    times = [start_s + n * step_s for n in range(len(tokens))]
    pairs = zip(tokens, times, strict=True)
    return [Label(token, time, time + length_s, 0.5) for token, time in pairs]


def labels(text, start_s=0.0, step_s=0.08):
    """A label a character."""
    return row(TOKENIZER.encode(text), start_s, step_s, FRAME_S)


def late(labels, by_s):
    return [label._replace(start_s=label.start_s + by_s) for label in labels]


def text_of(labels):
    return TOKENIZER.decode([label.token for label in labels])


SPOKEN = st.sampled_from(["one", "two", "three", "no", "on", "a", "aa", "four five"])


@st.composite
def recordings(draw):
    """Labels of a recording, and what two windows of it have: times off by up to four frames,
    nonsense at their edges."""
    spoken = draw(st.lists(SPOKEN, min_size=8, max_size=40))
    truth = labels(" ".join(spoken), 0.2, draw(st.sampled_from([0.04, 0.08, 0.12])))
    end = truth[-1].start_s + 0.2
    start_s = draw(st.floats(0.0, max(end - 3.0, 0.0)))
    end_s = min(start_s + 3.0, end)
    shift = st.sampled_from([0, 0, 0, -4, -2, -1, 1, 2, 4])
    found = []
    for low, high in ((0.0, end_s), (start_s, end)):
        before = low
        window = []
        for label in truth:
            if low <= label.start_s < high:
                time = label.start_s + draw(shift) * FRAME_S
                before = min(max(before, time), high)
                window.append(label._replace(start_s=before, end_s=before + FRAME_S))
        found.append(window)
    first, second = found
    lost = draw(st.integers(0, 3))  # half a word at the edge is not understood
    if end_s < end:
        first = first[: len(first) - lost]
    if start_s > 0:
        second = [*labels("x", start_s), *second[lost:]]
    return truth, first, second, start_s, end_s


@given(recordings())
def test_two_windows_that_time_labels_differently_are_joined_to_the_spoken_text(
    recording,
):
    truth, first, second, start_s, end_s = recording
    assume(end_s - start_s > 2.9)  # else the recording is shorter than the overlap
    joined = join(first, second, start_s, end_s)
    assert text_of(joined) == text_of(truth)
    starts = [label.start_s for label in joined]
    assert starts == sorted(starts)


ONES = labels("one one one one one one one one", 0.0, 0.2)
FIRST = labels("one two")
LATER = labels("nine", 9.0)


def around(word, start_s):
    """A word between two letters that both windows have."""
    return [*labels("x", 0.1), *labels(word, start_s, 0.1), *labels("x", 2.5)]


@pytest.mark.parametrize(
    ("first", "second", "start_s", "end_s", "texts"),
    [
        # What only one window has is kept on its side of the cut,
        (FIRST, LATER, 8.0, 10.0, ["one twonine"]),
        (FIRST, [], 8.0, 10.0, ["one two"]),
        ([], LATER, 8.0, 10.0, ["nine"]),
        # also of windows that only touch.
        (FIRST, LATER, 9.0, 9.0, ["one twonine"]),
        ([*FIRST, *labels("s", 9.0)], LATER, 9.0, 9.0, ["one twosnine"]),
        # A word in the middle that they write differently is that of either.
        (around("seven", 1.05), around("night", 1.1), 0.0, 2.6, ["xsevenx", "xnightx"]),
        # Repeated words are neither merged nor doubled.
        (ONES[:23], late(ONES[10:], FRAME_S), 2.0, 4.5, [text_of(ONES)]),
    ],
)
def test_windows_are_joined_in_a_pause(first, second, start_s, end_s, texts):
    assert text_of(join(first, second, start_s, end_s)) in texts


def test_labels_of_two_windows_come_in_the_order_of_time():
    def timed(*pairs):
        return [labels(text, at_s)[0] for text, at_s in pairs]

    first = timed(("o", 7.36), ("n", 7.52))
    second = timed((" ", 7.2), ("o", 7.24), ("n", 7.24), (" ", 7.84))
    joined = join(first, second, 5.44, 9.44)
    starts = [label.start_s for label in joined]
    assert starts == sorted(starts)
    (on,) = words(joined, TOKENIZER)
    assert on.text == "on" and on.end_s > on.start_s
    # what is in one window alone stays between its neighbours
    first = timed(("a", 1.3), ("b", 1.4), ("c", 5.0))
    second = timed(("a", 1.0), ("x", 1.1), ("y", 1.5), ("b", 1.5), ("c", 5.0))
    for end_s in (1.45, 2.6, 6.0, 9.0):
        joined = join(first, second, 0.0, end_s)
        assert text_of(joined) in ("abc", "axybc")
        starts = [label.start_s for label in joined]
        assert starts == sorted(starts)
    # and a label that both have is there once, if one window has others around it
    c, d = (labels(10 * text, 0.05, 0.1) + labels(9 * text, 1.5, 0.1) for text in "cd")
    first = [*c[:10], *timed(("a", 1.4)), *c[10:]]
    second = [*d[:10], *timed(("a", 1.02), ("x", 1.06)), *d[10:]]
    assert text_of(join(first, second, 0.0, 2.4)).count("a") == 1


def test_a_word_with_other_pieces_in_each_window_is_not_written_twice():
    before, after = row(range(1, 7), 0.1), row(range(10, 16), 1.0)  # no pause anywhere
    split, whole = row([20, 21], 0.7, 0.2), row([22], 0.8)
    first, second = [*before, *split, *after], [*before, *whole, *after]
    assert text_of(join(first, second, 0.0, 1.6)) in (text_of(first), text_of(second))


def test_words_begin_and_end_with_their_letters_and_not_with_the_space_between():
    one, two = words(labels(" one  two", 0.0, 0.1), TOKENIZER)
    assert (one.text, two.text) == ("one", "two")
    assert [*one[1:3], *two[1:3]] == pytest.approx([0.1, 0.34, 0.6, 0.84])
    assert words([], TOKENIZER) == words(labels("   "), TOKENIZER) == []


def test_a_word_has_the_least_confidence_of_its_labels_and_ends_before_the_next():
    letters = row(TOKENIZER.encode("ab c"), length_s=1.0)
    sure = (0.3, 0.9, 0.1, 0.8)
    pairs = zip(letters, sure, strict=True)
    found = words([one._replace(confidence=p) for one, p in pairs], TOKENIZER)
    last = letters[3]
    wanted = [Word("ab", 0.0, last.start_s, 0.3), Word("c", *last[1:3], 0.8)]
    assert found == wanted


def test_pieces_of_a_sentencepiece_model_make_the_words_of_its_text(train_pieces):
    texts = ["the old cat slept behind the river", "yesterday anna found the teacher"]
    tokenizer = train_pieces([*texts, "play the radio"], vocab_size=40)
    for text in texts:
        tokens = tokenizer.encode(text)
        found = [word.text for word in words(row(tokens), tokenizer)]
        assert len(tokens) > len(found)
        assert found == text.split()


@given(st.lists(st.integers(0, 27), max_size=60))
def test_the_words_are_those_of_the_text_whatever_the_labels(tokens):
    found = words(row(tokens), TOKENIZER)
    assert [word.text for word in found] == TOKENIZER.decode(tokens).split()


CHARACTERS = CharTokenizer(" a3.,「」。ー你好我们かょเทยั한국")


@pytest.mark.parametrize("text, wanted", [
    ("你好。我们3.3好 你", ["你", "好。", "我", "们", "3.3", "好", "你"]),
    ("「你好」aa我", ["「你", "好」", "aa", "我"]),
    ("かょーか", ["かょー", "か"]),
    ("เทยัย", ["เท", "ยั", "ย"]),
    ("한국 국aa", ["한국", "국aa"]),  # Korean has spaces
])  # fmt: skip
def test_in_scripts_without_spaces_a_word_is_what_its_label_writes(text, wanted):
    found = words(row(CHARACTERS.encode(text)), CHARACTERS)
    assert [word.text for word in found] == wanted
    whole = "".join(" " * (not word.joined) + word.text for word in found)
    assert whole == " " + text
    times = [time for word in found for time in word[1:3]]
    assert times == sorted(times)
    assert all(word.end_s > word.start_s for word in found)


@pytest.mark.parametrize("before", [0, 1, 60, 62, 63])
@pytest.mark.parametrize("text", ["鬱", "鬱。é鬱", "éé", "😀"])
def test_bytes_of_a_character_stay_together(train_pieces, before, text):
    options = {"byte_fallback": True, "normalization_rule_name": "identity"}
    tokenizer = train_pieces(["x x y yx"] * 9, 270, **options)
    tokens = tokenizer.encode("x" * before + text)
    assert len(tokens) >= before + len(text.encode())  # a label a byte
    found = words(row(tokens), tokenizer)
    assert "".join(word.text for word in found) == "x" * before + text
    assert not any("\ufffd" in word.text for word in found)
    assert found[-1].end_s == row(tokens)[-1].end_s
    own = words(row(tokens[:-1]), tokenizer)  # the model's own text breaks off
    assert own[-1].text.endswith("\ufffd")


@pytest.mark.parametrize("spaces, sizes", [(0, [64, 64, 64, 8]), (2, [64, 64, 64, 6])])
def test_labels_without_white_space_make_words_of_bounded_length_and_lose_none(
    spaces, sizes
):
    tokens = [2 + n % 26 for n in range(200)]
    tokens[64 : 64 + spaces] = [0] * spaces  # just where another word begins
    found = [word.text for word in words(row(tokens), TOKENIZER)]
    assert [*map(len, found)] == sizes
    assert "".join(found) == TOKENIZER.decode(tokens).replace(" ", "")
