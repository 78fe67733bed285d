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
from asrkit.workbench.lessons import batching as lesson

LENGTHS = web_like(600, seed=0)
MEMORY = Limit(CANARY_MEMORY, 1.0)


def test_shares_of_the_ranks_time_add_up_to_all_of_it():
    pairs = plan(Random(limit=MEMORY), LENGTHS, ranks=4, seed=0).pairs(LENGTHS)
    account = padding_account(pairs, cost=CANARY_COMPUTE, limit=MEMORY, ranks=4)
    shares = lesson.compute_shares(account, LENGTHS, CANARY_COMPUTE)
    assert sum(shares.values()) == pytest.approx(100)
    assert shares["useful"] == pytest.approx(100 * account.utilisation)
    assert min(shares.values()) > 0
    seconds, tokens = (
        sum(len(batch) * max(batch) - sum(batch) for batch in batches)
        for batches in zip(*pairs, strict=True)
    )
    lost = CANARY_COMPUTE.per_second * seconds / (CANARY_COMPUTE.per_token * tokens)
    assert shares["padded audio"] / shares["padded text"] == pytest.approx(lost)


def test_random_batches_by_seconds_fill_the_memory_and_never_exceed_it():
    strategy = lesson.random_by_seconds(LENGTHS, MEMORY, ranks=2, seed=0)
    pairs = plan(strategy, LENGTHS, ranks=2, seed=0).pairs(LENGTHS)
    account = padding_account(pairs, cost=CANARY_COMPUTE, limit=MEMORY, ranks=2)
    assert 0.8 < account.memory_max <= 1


def test_batches_of_sorted_utterances_meet_again_and_random_ones_do_not():
    fixed = lesson.repeated_share(Sorted(limit=at_most_utterances(10)), LENGTHS)
    shuffled = lesson.repeated_share(Random(limit=at_most_utterances(10)), LENGTHS)
    assert fixed == 1.0
    assert shuffled < 0.1


def test_balanced_batches_use_more_of_the_ranks_than_random_ones():
    used = {}
    for name, strategy in lesson.strategies(LENGTHS, MEMORY, CANARY_COMPUTE).items():
        pairs = plan(strategy, LENGTHS, ranks=2, seed=0).pairs(LENGTHS)
        used[name] = padding_account(pairs, cost=CANARY_COMPUTE, ranks=2).utilisation
    assert used["random"] < used["balanced"]
