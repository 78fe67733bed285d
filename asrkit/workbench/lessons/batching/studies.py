"""Batches of utterances whose lengths vary: ways to make them, and where the compute goes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asrkit.data import Account, Cost, Lengths, Limit
    from asrkit.data.batching.strategies import Strategy

START_S = 2000.0
PARTS = ("useful", "padded audio", "padded text", "waiting")


def ways_to_batch(lengths: "Lengths", limit: "Limit", work: "Cost") -> "dict[str, Strategy]":
    """Random batches, 1D and 2D buckets of synchronized ranks, and balanced batches.

    Args:
        lengths: Of the utterances.
        limit: Memory that no batch exceeds.
        work: Compute of a batch, by which the ranks of a step draw alike.
    """
    from asrkit.data import Balanced, Bucketed, Random, buckets_1d, buckets_2d

    return {
        "random": Random(limit=limit),
        "1D": Bucketed(buckets=buckets_1d(lengths, limit), work=work),
        "2D": Bucketed(buckets=buckets_2d(lengths, limit), work=work),
        "balanced": Balanced(limit=limit, work=work),
    }


def random_by_seconds(
    lengths: "Lengths", memory: "Limit", *, ranks: int, seed: int = 0
) -> "Strategy":
    """Random batches of as many padded seconds as memory allows for every batch of the epoch.

    Args:
        lengths: Of the utterances.
        memory: Limit of a batch.
        ranks: That train together.
        seed: Of the epoch.
    """
    from asrkit.data import Random, at_most_seconds, linear, padding_account, plan

    seconds = START_S
    while True:
        strategy = Random(limit=at_most_seconds(seconds))
        pairs = plan(strategy, lengths, ranks=ranks, seed=seed).pairs(lengths)
        fullest = padding_account(pairs, cost=linear(), limit=memory).memory_max
        assert fullest is not None
        if fullest <= 1:
            return strategy
        seconds *= min(0.99, fullest**-0.7)


def compute_shares(account: "Account", lengths: "Lengths", cost: "Cost") -> dict[str, float]:
    """What the ranks could have computed in the time, split into `PARTS`, in per cent.

    Args:
        account: Of the batches.
        lengths: Of the utterances in them.
        cost: Model of compute; its parts in seconds and in tokens divide the padding.
    """
    audio = _padded(cost.per_second * lengths.seconds.sum(), account.audio_padding)
    text = _padded(cost.per_token * lengths.tokens.sum(), account.token_padding)
    padding = 1 - account.utilisation - account.straggler
    audio_share = padding * audio / (audio + text)
    text_share = padding * text / (audio + text)
    values = (account.utilisation, audio_share, text_share, account.straggler)
    return {part: 100 * value for part, value in zip(PARTS, values, strict=True)}


def _padded(useful: float, padding: float) -> float:
    """What padding costs where `useful` is the rest of the same total."""
    return useful * padding / (1 - padding)


def share_met_again(strategy: "Strategy", lengths: "Lengths", *, seed: int = 0) -> float:
    """Of the pairs of utterances that share a batch, the share that does in the next epoch too.

    Args:
        strategy: Makes the batches of one rank.
        lengths: Of the utterances.
        seed: Of the epochs.
    """
    from asrkit.data import plan

    numbers = []
    for epoch in (0, 1):
        batch_of = np.empty(len(lengths), dtype=int)
        for number, (rows,) in enumerate(plan(strategy, lengths, seed=seed, epoch=epoch).steps):
            batch_of[rows] = number
        numbers.append(batch_of)
    return float(_pairs_within(np.stack(numbers)) / _pairs_within(numbers[0]))


def _pairs_within(numbers: np.ndarray) -> int:
    """Ordered pairs of utterances that agree in all their numbers, one column an utterance."""
    _, counts = np.unique(numbers, axis=-1, return_counts=True)
    return int((counts * (counts - 1)).sum())


def log_spread(lengths: "Lengths") -> float:
    """Standard deviation of the logarithm of the seconds.

    Args:
        lengths: Of the utterances.
    """
    return float(np.log(lengths.seconds).std())


def drawn_padding(lengths: "Lengths", n: int, *, seed: int = 0) -> float:
    """Share of padding in random batches of `n` utterances, drawn once.

    Args:
        lengths: Of the utterances.
        n: Utterances of a batch.
        seed: Of the batches.
    """
    from asrkit.data import Random, at_most_utterances, linear, padding_account, plan

    strategy = Random(limit=at_most_utterances(n))
    pairs = plan(strategy, lengths, seed=seed).pairs(lengths)
    return padding_account(pairs, cost=linear()).compute_padding


def in_published_runs(runs: Any) -> dict[str, Mapping[Any, float]]:
    """How MLPerf's RNN-T took more epochs with larger batches, and with buckets.

    Args:
        runs: A table of runs with the columns status, buckets, global_batch and epochs.

    Returns:
        "larger": global batch -> epochs over those at 512, both with one bucket; "buckets":
        global batch -> epochs with six buckets over those with one.
    """
    done = runs[runs["status"] == "success"]
    epochs = done.groupby(["buckets", "global_batch"])["epochs"].mean()
    one = epochs[1]
    six = epochs[6]
    return {
        "larger": {batch: mean / one[512] for batch, mean in one.items()},
        "buckets": {batch: mean / one[batch] for batch, mean in six.items() if batch in one},
    }
