import csv
import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lhotse import CutSet, SupervisionSegment
from lhotse.testing.dummies import dummy_cut

from asrkit.data import Lengths, web_like
from asrkit.text import CharTokenizer


def cut_with_texts(number, seconds, *texts):
    supervisions = [
        SupervisionSegment(f"s{number}-{n}", "r", 0, seconds, text=text)
        for n, text in enumerate(texts)
    ]
    return dummy_cut(number, start=0.0, duration=seconds, supervisions=supervisions)


def test_lengths_of_cuts_are_seconds_and_the_characters_or_tokens_of_all_texts():
    rows = [(2.5, "ab", "c"), (4.0,), (1.0, None, "dd")]
    cuts = CutSet.from_cuts(cut_with_texts(n, *row) for n, row in enumerate(rows))
    for options in ({}, {"tokens": CharTokenizer()}):
        lengths = Lengths.of_cuts(cuts, **options)
        assert lengths.seconds.tolist() == [2.5, 4.0, 1.0]
        assert lengths.tokens.tolist() == [4, 0, 2]
    assert len(Lengths.of_cuts([])) == 0


def test_hours_and_tokens_per_second_follow_from_lengths():
    lengths = Lengths([1800.0, 3600.0], [900, 7200])
    assert lengths.hours == 1.5
    assert lengths.tokens_per_second.tolist() == [0.5, 2.0]
    for second in (np.array([1]), lengths.seconds > 2000):
        assert lengths.take(second).tokens.tolist() == [7200]


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.integers(0, 10**12))), st.booleans())
def test_a_written_table_reads_back_the_same(tmp_path_factory, rows, compressed):
    path = tmp_path_factory.mktemp("table") / ("l.csv.gz" if compressed else "l.csv")
    lengths = Lengths([row[0] for row in rows], [row[1] for row in rows])
    lengths.save(path)
    again = Lengths.read(path)
    assert again.seconds.tolist() == lengths.seconds.tolist()
    assert again.tokens.tolist() == lengths.tokens.tolist()
    raw = path.read_bytes()
    assert raw.startswith(b"\x1f\x8b") == compressed
    # no date: equal tables are equal files
    assert not compressed or raw[4:8] == bytes(4)


def test_tokens_may_be_missing_and_other_columns_and_a_byte_order_mark_are_ignored(
    tmp_path,
):
    for text in ("seconds\n1.5\n2\n", "\ufeffseconds,id,tokens\n1.5,a,\n2,b,\n"):
        (tmp_path / "l.csv").write_text(text, encoding="utf-8")
        lengths = Lengths.read(tmp_path / "l.csv")
        assert (*lengths.seconds, *lengths.tokens) == (1.5, 2, 0, 0)


ZIPPED = gzip.compress(
    b"seconds,tokens\n" + b"".join(b"%d,%d\n" % (n % 97 + 1, n) for n in range(5000))
)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"", "header"),
        (b"seconds,tokens\n1,x\n", "invalid literal"),
        (b"seconds,tokens\n1,-3\n", "0 or more"),
        (b'seconds,tokens\n"1,' + b"3" * (csv.field_size_limit() + 1), "field limit"),
        (ZIPPED[:-9], "end-of-stream"),
        (None, "No such file"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line_with_its_file(tmp_path, raw, message):
    path = tmp_path / ("broken.csv.gz" if raw == ZIPPED[:-9] else "broken.csv")
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        Lengths.read(path)
    message = str(caught.value)
    wanted = "lengths: expected CSV with the columns seconds and tokens, got "
    assert message.startswith(wanted)
    assert "broken.csv" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "seconds, tokens, message",
    [
        ([1.0, 2.0], [1], "one of each"),
        (
            [1.0, float("inf")],
            [1, 1],
            r"seconds: expected finite and above 0, got \[inf\]",
        ),
        (
            [1.0, 2.0],
            [1, 2.5],
            r"tokens: expected whole numbers, 0 or more, got \[2\.5\]",
        ),
    ],
)
def test_invalid_lengths_are_refused(seconds, tokens, message):
    with pytest.raises(ValueError, match=message):
        Lengths(seconds, tokens)


def test_web_like_lengths_depend_on_their_seed_and_have_the_given_spread():
    first, again, other = (web_like(20_000, seed=seed) for seed in (1, 1, 2))
    seconds = first.seconds
    assert np.array_equal(seconds, again.seconds)
    assert not np.array_equal(seconds, other.seconds)
    assert (seconds.min(), seconds.max()) == (0.5, 40.0)
    assert first.tokens.min() >= 1
    assert abs(np.median(seconds) / 6.7 - 1) < 0.03
    # short ones have whole numbers of few tokens
    rates = first.tokens_per_second[(seconds > 2) & (seconds < 39)]
    assert abs(np.log(rates).std() - 0.4) < 0.02
