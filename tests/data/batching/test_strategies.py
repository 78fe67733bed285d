import numpy as np
import pytest
from hypothesis import given, settings
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
    Random,
    Sorted,
    at_most_seconds,
    at_most_utterances,
    buckets_1d,
    buckets_2d,
    padding_account,
    plan,
    shipped_lengths,
    web_like,
)
from asrkit.data.batching.strategies import cut


class Own:
    """A constraint that is no Limit: two at once."""

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


def held(made):
    """Rows of all batches."""
    return (
        np.concatenate([rows for step in made.steps for rows in step])
        if made.steps
        else np.empty(0, dtype=int)
    )


def same(first, second):
    """Whether two plans are equal."""
    pairs = zip(
        [r for step in first.steps for r in step],
        [r for step in second.steps for r in step],
        strict=False,
    )
    return len(first.steps) == len(second.steps) and all(
        np.array_equal(*pair) for pair in pairs
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("data", SETS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_every_row_is_in_one_batch_that_fits_and_every_rank_has_one_in_every_step(
    name, data, ranks
):
    lengths, planned = SETS[data], 0
    for limit in LIMITS.values():
        if limit is LIMITS["own"] and name in ("1d", "2d", "unsynchronized"):
            continue  # tables are made of Limits
        strategy = STRATEGIES[name](lengths, limit)
        N = len(lengths)
        if (
            N % ranks
            and len(strategy.batches(lengths, ranks, np.random.default_rng([0, 0]))[0])
            == N
        ):
            with pytest.raises(
                ValueError,
                match=f"batches to halve for {ranks} ranks, got {N} utterances in {N} batches",
            ):
                plan(strategy, lengths, ranks=ranks)
            continue
        made = plan(strategy, lengths, ranks=ranks)
        planned += 1
        assert np.array_equal(np.sort(held(made)), np.arange(N)) and not len(
            made.dropped
        )
        for step in made.steps:
            assert len(step) == ranks
            for rows in step:
                fits = (
                    limit.share(
                        len(rows),
                        lengths.seconds[rows].max(),
                        lengths.tokens[rows].max(),
                    )
                    <= 1
                )
                assert len(rows) == 1 or (len(rows) and fits)
    assert planned or data == "a giant"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_follows_from_seed_and_epoch_and_changes_with_either(name):
    lengths = SETS["web"]
    strategy = STRATEGIES[name](lengths, SMALL)
    first = plan(strategy, lengths, ranks=2, seed=1, epoch=2)
    assert same(first, plan(strategy, lengths, ranks=2, seed=1, epoch=2))
    for seed, epoch in ((0, 2), (1, 1), (2, 1)):
        assert same(
            first, plan(strategy, lengths, ranks=2, seed=seed, epoch=epoch)
        ) == (name == "sorted")


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_as_many_utterances_as_ranks_are_enough_and_fewer_are_refused(N, more):
    lengths = web_like(N)
    for strategy in (Random(limit=SMALL), Sorted(limit=SMALL), Balanced(limit=SMALL)):
        assert [len(rows) for rows in plan(strategy, lengths, ranks=N).steps[0]] == [
            1
        ] * N
        with pytest.raises(
            ValueError,
            match=f"lengths: expected an utterance for each of {N + more} ranks, got {N}",
        ):
            plan(strategy, lengths, ranks=N + more)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 90)), max_size=60),
    st.floats(0.5, 200), st.floats(0.1, 1.0),
)  # fmt: skip
def test_a_cut_is_as_long_as_can_be(rows, seconds, most):
    lengths, limit = (
        Lengths([row[0] for row in rows], [row[1] for row in rows]),
        at_most_seconds(seconds),
    )
    plain, longest = [], 0.0
    for row, D in enumerate(lengths.seconds):
        longest = max(longest, D)
        if not plain or (len(plain[-1]) + 1) * longest / seconds > most:
            plain.append([])
            longest = D
        plain[-1].append(row)
    assert [
        part.tolist()
        for part in cut(np.arange(len(lengths)), lengths, limit, most=most)
    ] == plain


def test_a_cut_looks_beyond_its_first_window():
    lengths = Lengths(np.full(5000, 1.0), np.zeros(5000))
    assert [
        len(part) for part in cut(np.arange(5000), lengths, at_most_seconds(1999))
    ] == [
        1999,
        1999,
        1002,
    ]


def test_sorted_goes_from_long_to_short():
    lengths = SETS["web"]
    made = plan(Sorted(limit=SMALL), lengths, ranks=1)
    assert np.array_equal(held(made), np.argsort(-lengths.seconds, kind="stable"))


@pytest.mark.parametrize("tails", ["carry", "keep", "drop"])
def test_tails_are_carried_kept_or_dropped_as_one_says(tails):
    lengths = Lengths(np.repeat([1.0, 2.0, 4.0], [10, 11, 12]), np.zeros(33))
    table = Buckets([1.0, 2.0, 4.0], [0, 0, 0], [4, 4, 4])
    made = plan(Bucketed(buckets=table, tails=tails), lengths)
    sizes = sorted(len(rows) for step in made.steps for rows in step)
    # 10 = 2 x 4 + 2; 11 (+ 2 carried) = 2 x 4 + 3 or 3 x 4 + 1; 12 (+ 1 carried) = 3 x 4 or 3 x 4 + 1
    assert (
        sizes
        == {"carry": [1] + [4] * 8, "keep": [2, 3] + [4] * 7, "drop": [4] * 7}[tails]
    )
    assert len(made.dropped) == (5 if tails == "drop" else 0)
    if tails == "keep":
        assert all(
            np.ptp(lengths.seconds[rows]) == 0 for step in made.steps for rows in step
        )


def test_a_tail_is_carried_only_to_where_it_has_room():
    lengths = Lengths([1.0, 2.0, 2.0, 2.0, 3.0, 3.0], [9, 2, 2, 2, 9, 9])
    made = plan(
        Bucketed(buckets=Buckets([1.0, 2.0, 3.0], [9, 2, 9], [3, 3, 3])), lengths
    )
    assert sorted(sorted(rows.tolist()) for (rows,) in made.steps) == [
        [0, 4, 5],
        [1, 2, 3],
    ]  # past the cell of 2 tokens


def test_misfits_are_an_error_or_dropped_and_counted():
    lengths, table = (
        Lengths([1.0, 2.0, 9.0, 1.0], [1, 1, 1, 50]),
        Buckets([2.0], [10], [2]),
    )
    with pytest.raises(
        ValueError,
        match="buckets: expected room for every utterance, got 2 misfits. Estimate",
    ):
        plan(Bucketed(buckets=table), lengths)
    made = plan(Bucketed(buckets=table, misfits="drop"), lengths)
    assert sorted(made.dropped) == [2, 3] and sorted(held(made)) == [0, 1]


def test_a_bucket_never_gives_more_than_its_size():
    lengths = SETS["web"]
    table = buckets_2d(lengths, SMALL, count=5, parts=3)
    for (rows,) in plan(Bucketed(buckets=table), lengths).steps:
        cells = table.cell(lengths.take(rows))
        assert (
            len(rows) <= table.sizes[cells].max()
        )  # with tails of smaller buckets, the largest counts


@pytest.mark.parametrize("synchronized", [True, False])
@pytest.mark.parametrize("tails", ["carry", "keep", "drop"])
def test_batches_of_buckets_are_drawn_anew_and_come_in_random_order(
    tails, synchronized
):
    lengths = SETS["web"]
    strategy = Bucketed(
        buckets=buckets_1d(lengths, SMALL, count=2),
        tails=tails,
        synchronized=synchronized,
    )
    first, second = (
        [rows for (rows,) in plan(strategy, lengths, epoch=epoch).steps]
        for epoch in (0, 1)
    )
    assert not {frozenset(rows.tolist()) for rows in first if len(rows) > 1} & {
        frozenset(rows.tolist()) for rows in second
    }
    longest = [lengths.seconds[rows].max() for rows in first]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.5


def test_synchronized_ranks_wait_less():
    lengths, wait = web_like(8000), []
    for synchronized in (True, False):
        table = buckets_1d(lengths, SMALL, count=20)
        made = plan(
            Bucketed(buckets=table, synchronized=synchronized, work=CANARY_COMPUTE),
            lengths,
            ranks=8,
        )
        wait.append(
            padding_account(made.pairs(lengths), cost=CANARY_COMPUTE, ranks=8).straggler
        )
    assert wait[0] < 0.03 < 0.1 < wait[1]


def test_steps_of_like_work_come_in_an_order_that_varies_and_has_no_trend():
    lengths = web_like(8000)
    work = []
    for epoch in range(2):
        made = plan(
            Balanced(limit=SMALL, work=CANARY_COMPUTE), lengths, ranks=2, epoch=epoch
        )
        work.append([lengths.seconds[step[0]].max() for step in made.steps])
    size = min(map(len, work))
    assert abs(np.corrcoef(work[0][:size], work[1][:size])[0, 1]) < 0.2
    assert abs(np.corrcoef(work[0], np.arange(len(work[0])))[0, 1]) < 0.2


def test_what_an_utterance_meets_changes_from_epoch_to_epoch():
    lengths = web_like(5000)

    def companions(epoch, **options):
        made = plan(Balanced(limit=SMALL, **options), lengths, epoch=epoch)
        return {
            (a, b)
            for (rows,) in made.steps
            for a in rows.tolist()
            for b in rows.tolist()
            if a < b
        }

    def again(**options):
        first, second = (companions(epoch, **options) for epoch in (0, 1))
        return len(first & second) / len(first)

    never = again(blur=(0.0, 0.0))
    assert again(blur=(0.2, 0.9)) < again() < never < 0.9
    assert again(blur=(0.2, 0.0)) < 0.9 * never and again(blur=(0.0, 0.9)) < 0.9 * never


def test_balanced_reaches_the_goal_on_web_like_lengths_and_drops_nothing():
    """150,000 utterances, 8 ranks, memory of a Canary: the goal of issue 6 is 92 %; the best 2D table reaches 85 %."""
    lengths, limit = web_like(150_000), Limit(CANARY_MEMORY, 1.0)
    made = plan(Balanced(limit=limit, work=CANARY_COMPUTE), lengths, ranks=8)
    account = padding_account(
        made.pairs(lengths), cost=CANARY_COMPUTE, limit=limit, ranks=8
    )
    assert (
        account.utilisation >= 0.948
        and account.memory_max <= 1
        and account.memory > 0.95
    )
    assert account.utterances == 150_000 and not len(made.dropped)


@pytest.mark.parametrize("epoch", range(3))
def test_balanced_reaches_the_goal_on_the_lengths_of_librispeech(epoch):
    """train-clean-100, 8 ranks: the goal of issue 6 is 95 %."""
    lengths, limit = (
        shipped_lengths("librispeech_train_clean_100"),
        Limit(CANARY_MEMORY, 1.0),
    )
    made = plan(Balanced(limit=limit), lengths, ranks=8, epoch=epoch)
    account = padding_account(
        made.pairs(lengths), cost=CANARY_COMPUTE, limit=limit, ranks=8
    )
    assert (
        account.utilisation >= 0.95
        and account.memory_max <= 1
        and not len(made.dropped)
    )


@pytest.mark.parametrize(
    "N, ranks, least",
    [(1000, 1, 0.6), (3000, 8, 0.7), (20_000, 8, 0.86), (20_000, 64, 0.82)],
)
def test_balanced_keeps_its_gain_on_smaller_sets_and_more_ranks(N, ranks, least):
    lengths, limit = web_like(N), Limit(CANARY_MEMORY, 1.0)
    ours, sorted_ = (
        padding_account(
            plan(strategy, lengths, ranks=ranks).pairs(lengths),
            cost=CANARY_COMPUTE,
            limit=limit,
            ranks=ranks,
        )
        for strategy in (
            Balanced(limit=limit, work=CANARY_COMPUTE),
            Sorted(limit=limit),
        )
    )
    assert ours.utilisation > least and ours.memory_max <= 1
    assert (
        ours.utilisation > sorted_.utilisation or ranks == 1
    )  # one rank, few batches: nothing to choose from


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_balanced_makes_no_more_batches_than_fill_the_last_step(ranks):
    for seed in range(12):
        lengths = web_like(500 + 37 * seed)
        one, several = (
            len(
                Balanced(limit=SMALL).batches(lengths, n, np.random.default_rng(seed))[
                    0
                ]
            )
            for n in (1, ranks)
        )
        aim = -(-one // ranks) * ranks
        assert one <= several <= aim and (several >= 0.9 * aim or one == several)


@pytest.mark.parametrize("tokens, most", [(True, 0.55), (False, 0.33)])
def test_in_the_next_epoch_most_of_a_batch_of_balanced_are_elsewhere(tokens, most):
    lengths = web_like(30_000)
    lengths = lengths if tokens else Lengths(lengths.seconds, np.zeros(30_000))
    limit, of = Limit(CANARY_MEMORY, 1.0), np.empty(30_000, dtype=int)
    first, second = (
        [
            rows
            for step in plan(Balanced(limit=limit), lengths, ranks=4, epoch=e).steps
            for rows in step
        ]
        for e in (0, 1)
    )
    for number, rows in enumerate(second):
        of[rows] = number
    together = sum(
        int((np.bincount(of[rows]) ** 2).sum()) - len(rows) for rows in first
    )
    assert together / sum(len(rows) * (len(rows) - 1) for rows in first) < most


def test_balanced_survives_a_limit_that_nothing_fits():
    lengths = Lengths(web_like(300).seconds, np.zeros(300))
    steps = plan(Balanced(limit=at_most_seconds(1e-9)), lengths).steps
    assert len(steps) == 300 and all(len(rows) == 1 for (rows,) in steps)


def test_balanced_fills_a_limit_of_which_each_batch_takes_a_part_for_itself():
    lengths = web_like(20_000)
    limit = Limit(
        Cost(
            name="o",
            unit="",
            source="a test",
            per_batch=0.7,
            per_second=1.167e-4,
            per_token=7.24e-6,
        ),
        1.0,
    )
    made = plan(Balanced(limit=limit, work=CANARY_COMPUTE), lengths, ranks=8)
    assert (
        padding_account(
            made.pairs(lengths), cost=CANARY_COMPUTE, limit=limit, ranks=8
        ).utilisation
        > 0.81
    )


def test_halved_batches_give_the_last_step_one_for_every_rank():
    lengths = Lengths(np.full(100, 1.0), np.zeros(100))
    made = plan(
        Sorted(limit=at_most_utterances(30)), lengths, ranks=3
    )  # 30 30 30 10 -> 6 batches
    assert sorted(len(rows) for step in made.steps for rows in step) == [
        10,
        15,
        15,
        15,
        15,
        30,
    ]
    with pytest.raises(
        ValueError,
        match=r"strategy: expected batches to halve for 3 ranks, got 4 .* in 4 batches. Allow larger",
    ):
        plan(Sorted(limit=at_most_utterances(1)), lengths.take(np.arange(4)), ranks=3)


@pytest.mark.parametrize("call, said", [
    (lambda: plan(Random(limit=SMALL), web_like(9), ranks=0), "ranks: expected a whole number of at least 1, got 0"),
    (lambda: plan(Random(limit=SMALL), web_like(9), seed=-1), r"seed, epoch: expected whole numbers from 0 up, got \(-1, 0\)"),
    (lambda: plan(None, web_like(9)), "strategy: expected Random, Sorted, Bucketed, Balanced, Presorted or one's own, got None"),
    (lambda: Bucketed(buckets=Buckets([1.0], [1], [1]), tails="burn"), "tails: expected one of 'carry', 'keep', 'drop', got 'burn'"),
    (lambda: Bucketed(buckets=Buckets([1.0], [1], [1]), misfits="keep"), "misfits: expected one of 'error', 'drop', got 'keep'"),
    (lambda: Bucketed(buckets=None), "buckets: expected asrkit.data.Buckets, got None"),
    (lambda: Balanced(limit=SMALL, blur=(0.1, 1.0)), "blur: expected two shares below 1"),
    (lambda: plan(Random(limit=None), web_like(9)), "limit: expected asrkit.data.Limit or one's own, got None"),
])  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(call, said):
    with pytest.raises(ValueError, match=said):
        call()
