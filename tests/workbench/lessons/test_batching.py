import numpy as np
import pandas as pd
import pytest

from asrkit.data import (
    CANARY_COMPUTE,
    CANARY_MEMORY,
    Limit,
    Random,
    Sorted,
    at_most_utterances,
    padding_account,
    plan,
    web_like,
)
from asrkit.workbench.lessons.batching import studies

LENGTHS = web_like(600, seed=0)
MEMORY = Limit(CANARY_MEMORY, 1.0)


def test_shares_of_the_ranks_time_add_up_to_all_of_it():
    pairs = plan(Random(limit=MEMORY), LENGTHS, ranks=4, seed=0).pairs(LENGTHS)
    account = padding_account(pairs, cost=CANARY_COMPUTE, limit=MEMORY, ranks=4)
    shares = studies.compute_shares(account, LENGTHS, CANARY_COMPUTE)
    assert tuple(shares) == studies.PARTS
    assert sum(shares.values()) == pytest.approx(100)
    assert shares["useful"] == pytest.approx(100 * account.utilisation)
    assert min(shares.values()) > 0


def test_random_batches_by_seconds_fill_the_memory_and_never_exceed_it():
    strategy = studies.random_by_seconds(LENGTHS, MEMORY, ranks=2, seed=0)
    pairs = plan(strategy, LENGTHS, ranks=2, seed=0).pairs(LENGTHS)
    account = padding_account(pairs, cost=CANARY_COMPUTE, limit=MEMORY, ranks=2)
    assert 0.8 < account.memory_max <= 1


def test_batches_of_sorted_utterances_meet_again_and_random_ones_do_not():
    fixed = studies.share_met_again(Sorted(limit=at_most_utterances(10)), LENGTHS)
    shuffled = studies.share_met_again(Random(limit=at_most_utterances(10)), LENGTHS)
    assert fixed == 1.0
    assert shuffled < 0.1


def test_balanced_batches_use_more_of_the_ranks_than_random_ones():
    used = {}
    for name, way in studies.ways_to_batch(LENGTHS, MEMORY, CANARY_COMPUTE).items():
        pairs = plan(way, LENGTHS, ranks=2, seed=0).pairs(LENGTHS)
        used[name] = padding_account(pairs, cost=CANARY_COMPUTE, ranks=2).utilisation
    assert list(used) == ["random", "1D", "2D", "balanced"]
    assert used["random"] < used["balanced"]


def test_drawn_padding_is_near_what_the_formula_expects():
    from asrkit.data.batching.statistics import padding_of_random

    drawn = [studies.drawn_padding(LENGTHS, 8, seed=seed) for seed in range(4)]
    assert np.mean(drawn) == pytest.approx(
        padding_of_random(LENGTHS.seconds, 8), abs=0.03
    )


def test_published_runs_are_compared_at_one_bucket_and_at_one_batch():
    runs = pd.DataFrame(
        [("success", 1, 512, 50), ("success", 1, 2048, 60), ("success", 1, 2048, 70),
         ("success", 6, 2048, 78), ("aborted", 1, 2048, 999)],
        columns=["status", "buckets", "global_batch", "epochs"],
    )  # fmt: skip
    found = studies.in_published_runs(runs)
    assert found["larger"][2048] == pytest.approx(65 / 50)
    assert found["buckets"] == {2048: pytest.approx(78 / 65)}


def test_the_spread_of_lengths_is_that_of_their_logarithm():
    assert studies.log_spread(
        web_like(20_000, seed=0, spread=0.5, most_s=1e6)
    ) == pytest.approx(0.5, abs=0.02)
