"""Notebook 08: batching strategies and their padding."""

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
from asrkit.workbench.lessons.shared.repeated_pairs import repeated_pairs
from asrkit.workbench.plots.marks import stacked
from asrkit.workbench.plots.palette import BLUE, colours_of


def strategies(lengths: Lengths, limit: Limit, work: Cost) -> dict[str, Strategy]:
    """Random batches, 1D and 2D buckets with synchronized ranks, and balanced batches.

    Args:
        lengths: Lengths of the utterances.
        limit: Largest memory of a batch.
        work: Compute of a batch, which is similar for all ranks of a step.
    """
    return {
        "random": Random(limit=limit),
        "1D": Bucketed(buckets=buckets_1d(lengths, limit), work=work),
        "2D": Bucketed(buckets=buckets_2d(lengths, limit), work=work),
        "balanced": Balanced(limit=limit, work=work),
    }


def random_by_seconds(lengths: Lengths, memory: Limit, *, ranks: int, seed: int = 0) -> Strategy:
    """Random batches with the largest number of padded seconds that fits memory in an epoch.

    Args:
        lengths: Lengths of the utterances.
        memory: Memory limit of a batch.
        ranks: Number of ranks that train together.
        seed: Seed of the epoch.
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
    """Shares of the ranks' time, in per cent: useful, padded audio, padded text and waiting.

    Args:
        account: Padding of the batches.
        lengths: Lengths of the utterances in them.
        cost: Model of compute. Its costs of a second and of a token divide the padding.
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


def repeated_share(strategy: Strategy, lengths: Lengths, *, seed: int = 0) -> float:
    """The share of the pairs of utterances in one batch that are in one batch again next epoch."""
    epochs = (plan(strategy, lengths, seed=seed, epoch=epoch).steps for epoch in (0, 1))
    return repeated_pairs(*epochs)


def utilisation_lines(curves: pd.DataFrame, ax: Axes, *, xlabel: str, low: float = 0.0) -> None:
    """Draw utilisation in per cent over the index, with a line for each strategy (column)."""
    for name, shade in colours_of(curves).items():
        ax.plot(curves.index, curves[name], "o-", ms=4, color=shade, label=name)
    ax.set(xlabel=xlabel, ylabel="utilisation, %", ylim=(low, 100))


def lengths_and_shares(
    seconds: np.ndarray, shares: Mapping[str, Mapping[str, float]], axes: Sequence[Axes]
) -> None:
    """Draw a histogram of lengths and, next to it, how each strategy uses the ranks' time.

    Args:
        seconds: Length of each utterance, (N,).
        shares: Variant -> part -> per cent.
        axes: Two Axes.
    """
    left, right = axes
    left.hist(seconds, bins=60, range=(0, 40), color=BLUE)
    left.set(xlabel="length, s", yticks=[], xlim=(0, 40))
    left.set_title(f"{seconds.mean():.1f} s on average")
    stacked(shares, right, unit="% of what the GPUs could compute")
    right.set_xlim(0, 100)
