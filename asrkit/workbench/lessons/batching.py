"""What notebook 08_batching measures and draws beyond its cells."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from asrkit.data import (
    Account,
    Balanced,
    Bucketed,
    Cost,
    Lengths,
    Limit,
    Random,
    at_most_seconds,
    buckets_1d,
    buckets_2d,
    linear,
    padding_account,
    plan,
)
from asrkit.data.batching.strategies import Strategy
from asrkit.workbench.plots.bars import stacked
from asrkit.workbench.plots.palette import BLUE, colours_of


def ways_to_batch(lengths: Lengths, limit: Limit, work: Cost) -> dict[str, Strategy]:
    """Random batches, 1D and 2D buckets of synchronized ranks, and balanced batches.

    Args:
        lengths: Of the utterances.
        limit: Memory that no batch exceeds.
        work: Compute of a batch, by which the ranks of a step draw alike.
    """
    return {
        "random": Random(limit=limit),
        "1D": Bucketed(buckets=buckets_1d(lengths, limit), work=work),
        "2D": Bucketed(buckets=buckets_2d(lengths, limit), work=work),
        "balanced": Balanced(limit=limit, work=work),
    }


def random_by_seconds(lengths: Lengths, memory: Limit, *, ranks: int, seed: int = 0) -> Strategy:
    """Random batches of as many padded seconds as memory allows for every batch of the epoch.

    Args:
        lengths: Of the utterances.
        memory: Limit of a batch.
        ranks: That train together.
        seed: Of the epoch.
    """
    seconds = 2000.0
    while True:
        strategy = Random(limit=at_most_seconds(seconds))
        pairs = plan(strategy, lengths, ranks=ranks, seed=seed).pairs(lengths)
        fullest = padding_account(pairs, cost=linear(), limit=memory).memory_max
        assert fullest is not None
        if fullest <= 1:
            return strategy
        seconds *= min(0.99, fullest**-0.7)


def compute_shares(account: Account, lengths: Lengths, cost: Cost) -> dict[str, float]:
    """What the ranks could have computed in the time, by part, in per cent.

    Args:
        account: Of the batches.
        lengths: Of the utterances in them.
        cost: Model of compute; its parts in seconds and in tokens divide the padding.
    """
    audio, text = account.audio_padding, account.token_padding
    audio *= cost.per_second * lengths.seconds.sum() / (1 - audio)
    text *= cost.per_token * lengths.tokens.sum() / (1 - text)
    padding = 1 - account.utilisation - account.straggler
    return {
        "useful": 100 * account.utilisation,
        "padded audio": 100 * padding * audio / (audio + text),
        "padded text": 100 * padding * text / (audio + text),
        "waiting": 100 * account.straggler,
    }


def share_met_again(strategy: Strategy, lengths: Lengths, *, seed: int = 0) -> float:
    """Of the pairs of utterances that share a batch, the share that does in the next epoch too."""
    numbers = np.empty((2, len(lengths)), dtype=int)  # of each utterance's batch, by epoch
    for epoch in (0, 1):
        steps = plan(strategy, lengths, seed=seed, epoch=epoch).steps
        for number, (rows,) in enumerate(steps):
            numbers[epoch, rows] = number
    return _pairs_within(numbers) / _pairs_within(numbers[:1])


def _pairs_within(numbers: np.ndarray) -> float:
    """Ordered pairs of utterances that agree in all their numbers, one column an utterance."""
    _, counts = np.unique(numbers, axis=1, return_counts=True)
    return float((counts * (counts - 1)).sum())


def utilisation_lines(curves: pd.DataFrame, ax: Axes, *, xlabel: str, low: float = 0.0) -> None:
    """Utilisation in per cent, a line for each way to make batches (column) over the index."""
    for name, shade in colours_of(curves).items():
        ax.plot(curves.index, curves[name], "o-", ms=4, color=shade, label=name)
    ax.set(xlabel=xlabel, ylabel="utilisation, %", ylim=(low, 100))


def lengths_and_shares(
    seconds: np.ndarray, shares: Mapping[str, Mapping[str, float]], axes: Sequence[Axes]
) -> None:
    """A histogram of lengths, and beside it how each way to batch them uses the ranks' time.

    Args:
        seconds: Length of each utterance, (N,).
        shares: Way -> part -> per cent.
        axes: Two Axes.
    """
    left, right = axes
    left.hist(seconds, bins=60, color=BLUE)
    left.set(xlabel="length, s", yticks=[], xlim=(0, 40))
    left.set_title(f"{seconds.mean():.1f} s on average")
    stacked(shares, right, unit="% of what the GPUs could compute")
    right.set_xlim(0, 100)
