import numpy as np
import pytest
from hypothesis import given
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
    usual_rates,
    web_like,
)

utterances = st.lists(
    st.tuples(st.floats(0.1, 40).map(lambda s: round(s, 2)), st.integers(0, 60)),
    min_size=1,
    max_size=60,
)
LIMIT = Limit(CANARY_MEMORY, 0.5)


def lengths_of(rows):
    return Lengths(*zip(*rows, strict=True))


@given(utterances, utterances, st.integers(-1, 8))
def test_an_utterance_belongs_to_the_first_cell_that_fits(cells, rows, above):
    cells = sorted(cells)
    buckets = Buckets(*zip(*cells, strict=True), [1] * len(cells))
    wanted = []
    for s, u in rows:
        fits = (k for k, (S, U) in enumerate(cells) if k > above and s <= S and u <= U)
        wanted.append(min(fits, default=-1))
    assert buckets.cell(lengths_of(rows), above=above).tolist() == wanted


@given(utterances, st.integers(1, 12))
def test_bins_cover_all_lengths_and_end_at_some(rows, count):
    lengths = lengths_of(rows)
    bins = duration_bins(lengths, count)
    assert 1 <= len(bins) <= count
    assert (np.diff(bins) > 0).all()
    assert set(bins) <= set(lengths.seconds)
    assert bins[-1] == lengths.seconds.max()


def test_bins_have_equal_seconds_of_skewed_speech():
    seconds = np.linspace(1, 3, 5000) ** 5
    bins = duration_bins(Lengths(seconds, np.zeros(5000)), 30)
    sums = np.bincount(np.searchsorted(bins, seconds), seconds)
    assert len(sums) == 30
    assert abs(sums / sums.mean() - 1).max() < 0.15


def test_usual_rates_leave_out_an_outlier_but_no_utterance_that_is_alone():
    seconds = np.append(np.full(50, 2.0), 100.0)
    tokens = np.append(20 + np.arange(50) % 3, 5000)  # the last one fills a bin
    tokens[7] = 200
    lengths = Lengths(seconds, tokens)
    assert duration_bins(lengths, 2).tolist() == [2, 100]
    usual = usual_rates(lengths, count=2)
    assert np.flatnonzero(~usual).tolist() == [7]
    assert usual_rates(lengths, count=2, deviations=8).all()


@given(utterances, st.integers(1, 6), st.integers(1, 4))
def test_tables_fit_every_utterance_and_their_full_cells_fit_the_limit(
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
        assert ((share <= 1) | (buckets.sizes == 1)).all()
        assert (more > 1).all()
    assert len(buckets) <= count * parts


def test_two_dimensions_allow_larger_batches_of_few_tokens():
    lengths = web_like(20_000)
    flat, deep = (make(lengths, LIMIT, count=10) for make in (buckets_1d, buckets_2d))
    assert len(flat) == 10
    assert len(deep) == 50
    mean = [len(lengths) / (1 / b.sizes[b.cell(lengths)]).sum() for b in (flat, deep)]
    assert mean[1] > 1.2 * mean[0]


def test_the_tail_of_a_bucket_of_one_dimension_fits_into_the_next():
    lengths = Lengths([1.0, 1.0, 5.0, 5.0], [90, 3, 4, 4])
    assert buckets_1d(lengths, at_most_seconds(10), count=6).tokens.tolist() == [90, 90]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Buckets([], [], []), "at least one"),
        (
            lambda: Buckets([1.0, 2.0], [1], [1, 1]),
            "equally many seconds, tokens and sizes",
        ),
        (lambda: Buckets([1.0, 1.0], [2, 1], [1, 1]), "sorted by both"),
        (
            lambda: Buckets([1.0, 2.0], [1, 1], [1, 0]),
            "buckets: expected cells .* with sizes of at least 1, got",
        ),
        (lambda: Buckets([float("nan")], [1], [1]), "of seconds above 0"),
        (
            lambda: duration_bins(Lengths([], []), 3),
            "lengths: expected at least one utterance, got none",
        ),
    ],
)
def test_invalid_tables_and_bins_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
