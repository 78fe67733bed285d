"""The helper that joins recordings: words and lengths add up, and silence is in its place."""

from collections import Counter

import numpy as np
import pytest
from long_recordings import (
    FRAME,
    SILENCES,
    SOUNDS,
    Piece,
    interrupted,
    long_recordings,
    read_pieces,
    spaced,
    trimmed,
    unbroken,
)

RATE_HZ = 16_000


@pytest.fixture(scope="module")
def pieces():
    return read_pieces()


def inside(long):
    """The samples of each piece."""
    return [cut(long, start_s, end_s) for start_s, end_s, _ in long.spans]


def gaps(long):
    """The samples between each two pieces."""
    ends = [end_s for _, end_s, _ in long.spans]
    starts = [start_s for start_s, _, _ in long.spans]
    return [cut(long, *one_gap) for one_gap in zip(ends[:-1], starts[1:], strict=True)]


def cut(long, start_s, end_s):
    return long.samples[round(start_s * RATE_HZ) : round(end_s * RATE_HZ)]


def level(samples):
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


def test_words_lengths_and_names_add_up(pieces):
    found = [*long_recordings(pieces)]
    assert len({long.name for long in found}) == len(found) == 11
    for long in found:
        assert long.samples.dtype == np.float32 and np.abs(long.samples).max() <= 1
        assert long.text == " ".join(text for _, _, text in long.spans)
        parts = inside(long) + gaps(long)
        assert sum(map(len, parts)) == len(long.samples), long.name
        assert long.spans[0][0] == 0
        assert long.spans[-1][1] * RATE_HZ == len(long.samples)
    minutes = len(found[-1].samples) / RATE_HZ / 60
    assert 19 < minutes < 24
    counts = Counter(text for _, _, text in found[-1].spans)
    assert set(counts.values()) == {10} and len(counts) == len(pieces)


def test_pieces_are_in_their_spans_in_an_order_of_the_seed(pieces):
    by_text = {text: samples for samples, text in pieces}
    one, same, other = spaced(pieces, 1), spaced(pieces, 1), spaced(pieces, 2)
    assert np.array_equal(one.samples, same.samples) and one.spans == same.spans
    assert one.text != other.text
    assert sorted(one.text.split()) == sorted(other.text.split())
    for samples, (_, _, text) in zip(inside(one), one.spans, strict=True):
        assert np.array_equal(samples, by_text[text])


@pytest.mark.parametrize("kind", [*SILENCES, *SOUNDS])
def test_pauses_are_within_bounds_and_hold_their_kind(pieces, kind):
    between = gaps(spaced(pieces, 0, kind, (0.5, 3.0)))
    lengths_s = [len(gap) / RATE_HZ for gap in between]
    assert len(between) == len(pieces) - 1
    assert 0.5 <= min(lengths_s) < 1 and 2.5 < max(lengths_s) <= 3
    levels = [level(gap) for gap in between]
    low, high = {"digital": (0, 0), "room": (0.0009, 0.0011), "music": (0.03, 0.1)}.get(
        kind, (0.049, 0.051)
    )
    assert low <= min(levels) and max(levels) <= high


def test_unbroken_speech_has_no_pause_and_the_requested_length(pieces):
    long = unbroken(pieces, 0, speech_s=60.0)
    assert all(len(gap) == 0 for gap in gaps(long))
    length_s = len(long.samples) / RATE_HZ
    assert length_s - (long.spans[-1][1] - long.spans[-1][0]) < 60 <= length_s
    longer = unbroken(pieces, 0, speech_s=300.0)
    assert len(longer.samples) >= 300 * RATE_HZ


def test_silence_is_trimmed_at_the_ends_alone():
    loud = np.sin(np.arange(RATE_HZ)).astype(np.float32) / 2
    silent = np.full(RATE_HZ // 2, 1e-3, np.float32)
    parts = [silent, loud, silent, loud, silent]
    found = trimmed(Piece(np.concatenate(parts), "a"))
    assert found.text == "a"
    assert 0 <= len(found.samples) - 2.5 * RATE_HZ <= 6 * FRAME
    assert level(found.samples[: 4 * FRAME]) > 0.1 < level(found.samples[-4 * FRAME :])


@pytest.mark.parametrize("kind", SILENCES)
def test_the_long_silence_is_in_the_middle(pieces, kind):
    long = interrupted(pieces, 0, kind, silent_s=30.0)
    between = gaps(long)
    longest = max(between, key=len)
    assert len(longest) == 30 * RATE_HZ
    assert {len(gap) for gap in between} == {30 * RATE_HZ, RATE_HZ // 2}
    place = [len(gap) for gap in between].index(len(longest))
    assert place == (len(pieces) - 1) // 2
    assert level(longest) <= 0.0011 and np.any(longest) == (kind == "room")
