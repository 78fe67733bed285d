import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.data import (
    CANARY_COMPUTE,
    CANARY_MEMORY,
    Balanced,
    Bucketed,
    Buckets,
    Cost,
    Lengths,
    Limit,
    Presorted,
    Random,
    Sorted,
    at_most_seconds,
    at_most_utterances,
    buckets_1d,
    buckets_2d,
    linear,
    padding_account,
    plan,
    shipped_lengths,
    web_like,
)
from asrkit.data.batching.strategies import cut


class Own:
    """A constraint other than Limit: two limits at once."""

    def share(self, n, D, U):
        """See Constraint."""
        return np.maximum(n * D / 100, n / 7)


SMALL = Limit(CANARY_MEMORY, 0.2)
LIMITS = {
    "seconds": at_most_seconds(100),
    "attention": at_most_seconds(100, quadratic=15),
    "utterances": at_most_utterances(6),
    "memory": SMALL,
    "tokens": Limit(Cost(name="t", unit="t", source="a test", per_token=1), 200),
    "costly batches": Limit(
        Cost(name="o", unit="s", source="a test", per_batch=50, per_second=1), 150
    ),
    "nothing fits": at_most_seconds(1e-9),
    "own": Own(),
}
STRATEGIES = {
    "random": lambda lengths, limit: Random(limit=limit),
    "sorted": lambda lengths, limit: Sorted(limit=limit),
    "balanced": lambda lengths, limit: Balanced(limit=limit, work=CANARY_COMPUTE),
    "1d": lambda lengths, limit: Bucketed(buckets=buckets_1d(lengths, limit, count=5)),
    "2d": lambda lengths, limit: Bucketed(
        buckets=buckets_2d(lengths, limit, count=5, parts=3), tails="keep"
    ),
    "unsynchronized": lambda lengths, limit: Bucketed(
        buckets=buckets_1d(lengths, limit, count=5), synchronized=False
    ),
}
SETS = {
    "web": web_like(400),
    "equal": Lengths(np.full(300, 5.0), np.full(300, 20)),
    "no tokens": Lengths(np.random.default_rng(0).uniform(0.5, 20, 300), np.zeros(300)),
    "a giant": Lengths(
        [*np.linspace(0.5, 5, 300), 4000.0], [*np.arange(300) // 9, 30_000]
    ),
    "64": Lengths(np.linspace(0.5, 5, 64), np.arange(64) % 13),
    "two lengths": Lengths(np.repeat([1.0, 30.0], 200), np.repeat([1, 300], 200)),
}


def listed(planned):
    """The rows of each rank's batch, step by step."""
    return [[rows.tolist() for rows in step] for step in planned.steps]


def all_rows(planned):
    """Rows of all batches."""
    return [row for step in listed(planned) for rows in step for row in rows]


def account(lengths, strategy, *, limit=None, ranks=1, epoch=0):
    planned = plan(strategy, lengths, ranks=ranks, epoch=epoch)
    return padding_account(
        planned.pairs(lengths), cost=CANARY_COMPUTE, limit=limit, ranks=ranks
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("data", SETS)
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_every_row_is_in_one_batch_that_fits_and_every_rank_has_one_in_every_step(
    name, data, ranks
):
    lengths = SETS[data]
    N = len(lengths)
    for limit in LIMITS.values():
        if limit is LIMITS["own"] and name in ("1d", "2d", "unsynchronized"):
            continue  # tables need a Limit
        strategy = STRATEGIES[name](lengths, limit)
        batches, _ = strategy.batches(lengths, ranks, np.random.default_rng([0, 0]))
        planned = plan(strategy, lengths, ranks=ranks)
        assert sorted([*all_rows(planned), *planned.dropped]) == list(range(N))
        alone = len(batches) == N  # batches of one utterance cannot be halved
        assert len(planned.dropped) == (N % ranks if alone else 0)
        assert {len(step) for step in planned.steps} == {ranks}
        for seconds, tokens in planned.pairs(lengths):
            share = limit.share(len(seconds), seconds.max(), tokens.max())
            assert len(seconds) == 1 or share <= 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_depends_on_seed_and_epoch(name):
    strategy = STRATEGIES[name](SETS["web"], SMALL)

    def planned(seed, epoch):
        return listed(plan(strategy, SETS["web"], ranks=2, seed=seed, epoch=epoch))

    first = planned(1, 2)
    assert first == planned(1, 2)
    for seed, epoch in ((0, 2), (1, 1), (2, 1)):
        assert (first == planned(seed, epoch)) == (name == "sorted")


@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 90)), max_size=60),
    st.floats(0.5, 200),
    st.floats(0.1, 1.0),
)
def test_a_batch_is_as_large_as_the_limit_allows(rows, seconds, most):
    lengths = Lengths([row[0] for row in rows], [row[1] for row in rows])
    plain = []
    longest = 0.0
    for row, D in enumerate(lengths.seconds):
        longest = max(longest, D)
        if not plain or (len(plain[-1]) + 1) * longest / seconds > most:
            plain.append([])
            longest = D
        plain[-1].append(row)
    parts = cut(np.arange(len(rows)), lengths, at_most_seconds(seconds), most=most)
    assert [part.tolist() for part in parts] == plain


def test_a_batch_may_exceed_the_first_window():
    lengths = Lengths(np.ones(5000), np.zeros(5000))
    parts = cut(np.arange(5000), lengths, at_most_seconds(1999))
    assert [len(part) for part in parts] == [1999, 1999, 1002]


@pytest.mark.parametrize(
    "tails, sizes",
    [
        # 10 = 2 x 4 + 2; 11 (+ 2 carried) = 2 x 4 + 3 or 3 x 4 + 1; 12 (+ 1 carried) = 3 x 4 or 3 x 4 + 1
        ("carry", [1] + [4] * 8),
        ("keep", [2, 3] + [4] * 7),
        ("drop", [4] * 7),
    ],
)
def test_tails_are_carried_kept_or_dropped(tails, sizes):
    lengths = Lengths(np.repeat([1.0, 2.0, 4.0], [10, 11, 12]), np.zeros(33))
    table = Buckets([1.0, 2.0, 4.0], [0, 0, 0], [4, 4, 4])
    planned = plan(Bucketed(buckets=table, tails=tails), lengths)
    pairs = planned.pairs(lengths)
    assert sorted(len(seconds) for seconds, _ in pairs) == sizes
    assert len(planned.dropped) == (5 if tails == "drop" else 0)
    assert tails == "carry" or all(np.ptp(seconds) == 0 for seconds, _ in pairs)


def test_a_tail_is_carried_only_to_where_it_fits():
    lengths = Lengths([1.0, 2.0, 2.0, 2.0, 3.0, 3.0], [9, 2, 2, 2, 9, 9])
    table = Buckets([1.0, 2.0, 3.0], [9, 2, 9], [3, 3, 3])
    planned = plan(Bucketed(buckets=table), lengths)
    # past the cell of 2 tokens
    assert sorted(sorted(rows) for (rows,) in listed(planned)) == [[0, 4, 5], [1, 2, 3]]


def test_utterances_that_fit_into_no_bucket_are_an_error():
    lengths = Lengths([1.0, 2.0, 9.0, 1.0], [1, 1, 1, 50])
    table = Buckets([2.0], [10], [2])
    message = (
        "buckets: expected room for every utterance, got 2 that are too large. Estimate"
    )
    with pytest.raises(ValueError, match=message):
        plan(Bucketed(buckets=table), lengths)
    with pytest.raises(ValueError, match="got 1 that are too large"):
        plan(Bucketed(buckets=table), Lengths([1.0, 9.0], [1, 1]))


def two_buckets(**options):
    table = buckets_1d(web_like(4000), SMALL, count=2)
    return Bucketed(buckets=table, **options)


@pytest.mark.parametrize(
    "strategy",
    [
        Balanced(limit=SMALL, work=CANARY_COMPUTE),
        *(two_buckets(tails=tails) for tails in ("carry", "keep", "drop")),
        two_buckets(synchronized=False),
    ],
)
def test_batches_change_with_the_epoch_and_have_no_trend(strategy):
    lengths = web_like(4000)
    first, second = (
        [rows for (rows,) in listed(plan(strategy, lengths, epoch=epoch))]
        for epoch in (0, 1)
    )
    again = {frozenset(rows) for rows in first} & {frozenset(rows) for rows in second}
    assert all(len(rows) == 1 for rows in again)
    longest = [lengths.seconds[rows].max() for rows in first]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


def test_synchronized_ranks_wait_less():
    lengths = web_like(8000)
    table = buckets_1d(lengths, SMALL, count=20)
    together, alone = (
        account(lengths, Bucketed(buckets=table, synchronized=which), ranks=8)
        for which in (True, False)
    )
    assert together.straggler < 0.03 < 0.1 < alone.straggler


def test_balanced_batches_do_not_depend_on_tokens_that_cost_nothing():
    lengths = web_like(500)
    silent = Lengths(lengths.seconds, np.zeros(500))
    strategy = Balanced(limit=at_most_seconds(100), work=linear())
    assert listed(plan(strategy, lengths)) == listed(plan(strategy, silent))


def test_an_utterance_shares_batches_with_others_in_each_epoch():
    lengths = web_like(5000)

    def companions(epoch, blur):
        planned = plan(Balanced(limit=SMALL, **blur), lengths, epoch=epoch)
        batches = [sorted(rows) for (rows,) in listed(planned)]
        return {pair for rows in batches for pair in itertools.combinations(rows, 2)}

    def again(*blur):
        options = {"blur": blur} if blur else {}
        first, second = (companions(epoch, options) for epoch in (0, 1))
        return len(first & second) / len(first)

    never = again(0.0, 0.0)
    assert again(0.2, 0.9) < again() < never < 0.8
    assert again(0.2, 0.0) < 0.9 * never
    assert again(0.0, 0.9) < 0.9 * never


WHOLE = Limit(CANARY_MEMORY, 1.0)
# 0.7 of the memory is used without any utterance.
COSTLY = Cost(
    name="o", unit="", source="", per_batch=0.7, per_second=1.167e-4, per_token=7.24e-6
)


@pytest.mark.parametrize(
    "lengths, limit, ranks, least",
    [
        # the goal is 92 %, for LibriSpeech 95 %; the best 2D table reaches 85 %
        (web_like(150_000), WHOLE, 8, 0.948),
        (shipped_lengths("librispeech_train_clean_100"), WHOLE, 8, 0.95),
        (web_like(3000), WHOLE, 8, 0.7),
        (web_like(20_000), WHOLE, 64, 0.82),
        (web_like(20_000), Limit(COSTLY, 1.0), 8, 0.81),
    ],
)
def test_balanced_reaches_the_goal_and_drops_nothing(lengths, limit, ranks, least):
    ours, theirs = (
        account(lengths, kind(limit=limit), limit=limit, ranks=ranks)
        for kind in (Balanced, Sorted)
    )
    assert ours.utilisation >= max(least, theirs.utilisation)
    assert ours.memory_max <= 1
    assert ours.utterances == len(lengths)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: plan(Random(limit=SMALL), web_like(9), ranks=0),
            "ranks: expected a whole number of at least 1, got 0",
        ),
        (
            lambda: plan(Random(limit=SMALL), web_like(9), seed=-1),
            r"seed, epoch: expected whole numbers from 0 up, got \(-1, 0\)",
        ),
        (
            lambda: plan(Random(limit=SMALL), web_like(9), ranks=10),
            "lengths: expected an utterance for each of 10 ranks, got 9",
        ),
        (
            lambda: plan(Presorted(None), web_like(9)),
            "strategy: expected Random, Sorted, Bucketed, Balanced, Presorted or your own, got Presorted",
        ),
        (
            lambda: Bucketed(buckets=Buckets([1.0], [1], [1]), tails="burn"),
            "tails: expected one of 'carry', 'keep', 'drop', got 'burn'",
        ),
        (
            lambda: Balanced(limit=SMALL, blur=(0.1, 1.0)),
            "blur: expected two shares below 1",
        ),
        (
            lambda: plan(Random(limit=None), web_like(9)),
            "limit: expected asrkit.data.Limit or your own, got None",
        ),
        (
            lambda: plan(Balanced(limit=10), web_like(9)),
            "limit: expected asrkit.data.Limit or your own, got 10",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
