import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.data import (
    CANARY_MEMORY,
    Buckets,
    Lengths,
    Limit,
    at_most_seconds,
    buckets_1d,
    buckets_2d,
    duration_bins,
    web_like,
)

utterances = st.lists(
    st.tuples(st.floats(0.1, 40).map(lambda s: round(s, 2)), st.integers(0, 60)),
    min_size=1,
    max_size=60,
)
LIMIT = Limit(CANARY_MEMORY, 0.5)


def lengths_of(rows):
    return Lengths([row[0] for row in rows], [row[1] for row in rows])


@settings(deadline=None)
@given(utterances, utterances, st.integers(-1, 8))
def test_an_utterance_belongs_to_the_first_cell_that_has_room(cells, rows, above):
    cells = sorted(cells)
    buckets = Buckets(
        [cell[0] for cell in cells], [cell[1] for cell in cells], [1] * len(cells)
    )
    fits = [
        [
            k
            for k, cell in enumerate(cells)
            if k > above and s <= cell[0] and u <= cell[1]
        ]
        for s, u in rows
    ]
    assert buckets.cell(lengths_of(rows), above=above).tolist() == [
        ks[0] if ks else -1 for ks in fits
    ]


@settings(deadline=None)
@given(utterances, st.integers(1, 12))
def test_bins_hold_all_lengths_and_are_lengths_that_occur(rows, count):
    lengths = lengths_of(rows)
    bins = duration_bins(lengths, count)
    assert 1 <= len(bins) <= count and (np.diff(bins) > 0).all()
    assert set(bins) <= set(lengths.seconds) and bins[-1] == lengths.seconds.max()


@pytest.mark.parametrize(
    "lengths",
    [
        web_like(20_000, most_s=1e9),
        Lengths(np.linspace(1, 3, 5000) ** 5, np.zeros(5000)),
    ],
)
def test_bins_hold_the_same_seconds_of_speech_each_however_skewed(lengths):
    of_bin = np.searchsorted(duration_bins(lengths, 30), lengths.seconds)
    sums = np.bincount(of_bin, lengths.seconds)
    assert len(sums) == 30
    assert abs(sums / sums.mean() - 1).max() < 0.15 and sums.sum() == pytest.approx(
        lengths.hours * 3600
    )


@settings(deadline=None)
@given(utterances, st.integers(1, 6), st.integers(1, 4))
def test_tables_have_room_for_every_utterance_and_their_full_cells_fit(
    rows, count, parts
):
    lengths = lengths_of(rows)
    for buckets in (
        buckets_1d(lengths, LIMIT, count=count),
        buckets_2d(lengths, LIMIT, count=count, parts=parts),
    ):
        assert (buckets.cell(lengths) >= 0).all()
        share = LIMIT.share(buckets.sizes, buckets.seconds, buckets.tokens)
        more = LIMIT.share(buckets.sizes + 1, buckets.seconds, buckets.tokens)
        assert ((share <= 1) | (buckets.sizes == 1)).all() and (more > 1).all()
    assert len(buckets) <= count * parts


def test_two_dimensions_make_room_for_larger_batches_of_utterances_with_few_tokens():
    lengths = web_like(20_000)
    flat, deep = (make(lengths, LIMIT, count=10) for make in (buckets_1d, buckets_2d))
    assert len(flat) == 10 and len(deep) == 50
    mean = [len(lengths) / (1 / b.sizes[b.cell(lengths)]).sum() for b in (flat, deep)]
    assert mean[1] > 1.2 * mean[0]


def test_a_longer_bucket_of_one_dimension_has_room_for_the_tail_of_a_shorter_one():
    lengths = Lengths([1.0, 1.0, 5.0, 5.0], [90, 3, 4, 4])
    assert buckets_1d(lengths, at_most_seconds(10), count=6).tokens.tolist() == [90, 90]


def test_equal_lengths_make_one_bucket():
    lengths = Lengths(np.full(50, 5.0), np.zeros(50))
    for buckets in (
        buckets_1d(lengths, at_most_seconds(100)),
        buckets_2d(lengths, at_most_seconds(100)),
    ):
        assert (
            buckets.seconds.tolist(),
            buckets.tokens.tolist(),
            buckets.sizes.tolist(),
        ) == (
            [5.0],
            [0],
            [20],
        )


def test_a_cell_of_which_not_one_fits_holds_one():
    assert Buckets([10.0], [0], [7]).sized(at_most_seconds(4)).sizes.tolist() == [1]


@pytest.mark.parametrize("table, said", [
    (([], [], []), "one at least"),
    (([1.0, 2.0], [1], [1, 1]), "as many seconds as tokens as sizes"),
    (([2.0, 1.0], [1, 1], [1, 1]), "sorted by both"),
    (([1.0, 1.0], [2, 1], [1, 1]), "sorted by both"),
    (([1.0, 2.0], [1, 1], [1, 0]), "buckets: expected cells .* with sizes of at least 1, got"),
    (([float("nan")], [1], [1]), "of seconds above 0"),
    (([1.0], [-1], [1]), "of seconds above 0"),
])  # fmt: skip
def test_tables_that_cannot_be_are_refused(table, said):
    with pytest.raises(ValueError, match=said):
        Buckets(*table)


def test_bins_of_nothing_are_refused():
    with pytest.raises(
        ValueError, match="lengths: expected at least one utterance, got none"
    ):
        duration_bins(Lengths([], []), 3)
    with pytest.raises(ValueError, match="count: expected at least 1, got 0"):
        duration_bins(web_like(5), 0)
