"""Accounts of padding in phases, and presorting, which balances phases across ranks."""

import itertools

import numpy as np
import pytest

from asrkit.data import (
    Balanced,
    Bucketed,
    Presorted,
    Random,
    at_most_utterances,
    buckets_1d,
    computed_seconds,
    linear,
    padding_account,
    plan,
    shipped_lengths,
    web_like,
)

LIMIT = at_most_utterances(6)
STRATEGIES = {
    "random": Random(limit=LIMIT),
    "balanced": Balanced(limit=LIMIT),
    "bucketed": Bucketed(
        buckets=buckets_1d(web_like(500), LIMIT, count=3), tails="keep"
    ),
}


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_presorted_step_has_the_same_utterances_from_extremes_to_middle(name, ranks):
    lengths = web_like(500)
    options = {"ranks": ranks, "seed": 3}
    before = plan(STRATEGIES[name], lengths, **options)
    after = plan(Presorted(STRATEGIES[name]), lengths, **options)
    assert len(after.steps) == len(before.steps)
    assert sorted(after.dropped) == sorted(before.dropped)
    for original, dealt in zip(before.steps, after.steps, strict=True):
        assert [len(rows) for rows in dealt] == [len(rows) for rows in original]
        assert sorted(np.concatenate(dealt)) == sorted(np.concatenate(original))
        seconds = [lengths.seconds[rows] for rows in dealt]
        seconds = [of_rank for of_rank in seconds if len(of_rank) > 1]
        for outer, inner in itertools.pairwise(seconds):
            assert outer.min() <= inner.min()
            assert inner.max() <= outer.max()


def test_presorting_balances_two_phases_and_unbalances_whole_batches():
    """As measured for MLPerf's rounds: 2 phases with it equal 8 without."""
    lengths = shipped_lengths("librispeech_train_clean_100")
    lengths = lengths.take(np.arange(0, len(lengths), 4))
    strategy = Random(limit=at_most_utterances(64))
    slowest = {}
    for name, one in (("random", strategy), ("presorted", Presorted(strategy))):
        pairs = plan(one, lengths, ranks=8).pairs(lengths)
        for phases in (1, 2, 8):
            account = padding_account(pairs, cost=linear(), ranks=8, phases=phases)
            slowest[name, phases] = 1 / account.utilisation
    assert slowest["presorted", 1] >= slowest["random", 1]
    assert slowest["presorted", 2] < 0.95 * slowest["random", 2]
    assert abs(slowest["presorted", 2] / slowest["random", 8] - 1) < 0.05
    assert slowest["random", 8] < slowest["random", 2] < slowest["random", 1]


def test_an_account_in_phases_computed_by_hand():
    batches = [([4.0, 2.0, 1.0], [8, 5, 3]), ([3.0, 3.0], [1, 1])]
    # two phases of the first batch: all three to 2 s, and the longest to 4 s; or 1 s and 4 s: 9
    assert computed_seconds([4.0, 2.0, 1.0], 2) == 2 * 3 + 2 * 1
    assert computed_seconds([4.0, 2.0, 1.0], 3) == 7
    assert computed_seconds([1.0, 4.0, 2.0], 9) == 7
    account = padding_account(batches, cost=linear(), ranks=2, phases=2)
    shares = (account.audio_padding, account.compute_padding, account.utilisation)
    assert shares == pytest.approx((1 - 13 / 14, 1 - 13 / 14, 13 / (2 * 8)))
    whole = padding_account(batches, cost=linear(), ranks=2)
    assert account.token_padding == whole.token_padding
    assert account.lattice_padding == whole.lattice_padding
