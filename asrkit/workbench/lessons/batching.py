"""Notebook 08: batching strategies, their padding, and small models trained with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from asrkit import files
from asrkit.data import (
    Account,
    Balanced,
    Bucketed,
    Cost,
    Lengths,
    Limit,
    Random,
    Utterances,
    at_most_seconds,
    buckets_1d,
    buckets_2d,
    linear,
    padding_account,
    plan,
)
from asrkit.data.batching.strategies import Strategy
from asrkit.models import TransducerConfig, load_checkpoint
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, evaluate, train
from asrkit.workbench.lessons.shared.repeated_pairs import repeated_pairs
from asrkit.workbench.plots.marks import stacked
from asrkit.workbench.plots.palette import BLUE, colours_of

LIMITS = 12  # number of limits that are tried for balanced batches


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
    left.hist(seconds, bins=60, color=BLUE)
    left.set(xlabel="length, s", yticks=[], xlim=(0, 40))
    left.set_title(f"{seconds.mean():.1f} s on average")
    stacked(shares, right, unit="% of what the GPUs could compute")
    right.set_xlim(0, 100)


@dataclass(frozen=True, kw_only=True)
class BatchedRun:
    """A small model that was trained on the batches of one strategy.

    Attributes:
        utterances: Number of utterances read in training, repetitions included.
        padded_s: Total seconds of audio computed up to each step, padding included.
        losses: Loss of each step, in nats per label.
        training_s: Wall time of the steps.
        wer: Word error rate on voices that were not in the training set.
    """

    utterances: int
    padded_s: np.ndarray
    losses: list[float]
    training_s: float
    wer: float


@dataclass(frozen=True, kw_only=True)
class BatchedTraining:
    """Trains a small model on batches of any strategy, on the same utterances.

    Attributes:
        speech: The sets "train" and "dev".
        lengths: Lengths of the training set, in its order.
        config: Configuration of the model.
        passes: Number of passes over the training set.
        threads: Number of torch's threads.
    """

    speech: dict[str, Utterances]
    lengths: Lengths
    config: TransducerConfig
    passes: int
    threads: int

    def steps(self, strategy: Strategy, seed: int) -> int:
        """Number of steps in all passes; `seed` is that of the batches."""
        epochs = islice(self._epochs(strategy, seed), self.passes)
        return sum(len(epoch.steps) for epoch in epochs)

    def balanced_with_steps(self, steps: int, most_s: float, seed: int) -> Strategy:
        """Balanced batches whose number of steps is closest to `steps`.

        Args:
            steps: Wanted number of steps.
            most_s: Largest limit of a batch to try, in padded seconds.
            seed: Seed of the batches.
        """
        limits = np.linspace(self.lengths.seconds.max(), most_s, LIMITS)
        candidates = [Balanced(limit=at_most_seconds(float(limit))) for limit in limits]
        return min(candidates, key=lambda strategy: abs(self.steps(strategy, seed) - steps))

    def run(self, strategy: Strategy, seed: int) -> BatchedRun:
        """Train from scratch, and evaluate; `seed` is that of weights and batches."""
        steps = self.steps(strategy, seed)
        tokenizer = CharTokenizer()
        result = train(
            self.config,
            tokenizer,
            self.speech["train"],
            out=files.home() / "batching",
            resume=False,
            progress=False,
            config=TrainConfig(steps=steps, seconds=36_000, seed=seed, threads=self.threads),
            batches=partial(self._batches, strategy, seed, tokenizer),
        )
        errors = evaluate(load_checkpoint(result.path), self.speech["dev"]).errors
        batches = [self.lengths.seconds[rows] for rows in islice(self._rows(strategy, seed), steps)]
        padded_s = [len(seconds) * seconds.max() for seconds in batches]
        return BatchedRun(
            utterances=sum(map(len, batches)),
            padded_s=np.cumsum(padded_s),
            losses=[step["loss"] for step in result.history],
            training_s=result.history[-1]["seconds"],
            wer=errors.rate,
        )

    def _epochs(self, strategy: Strategy, seed: int) -> Iterator[Any]:
        for epoch in count():
            yield plan(strategy, self.lengths, seed=seed, epoch=epoch)

    def _rows(self, strategy: Strategy, seed: int) -> Iterator[np.ndarray]:
        for epoch in self._epochs(strategy, seed):
            for (rows,) in epoch.steps:
                yield rows

    def _batches(
        self, strategy: Strategy, seed: int, tokenizer: CharTokenizer, first: int
    ) -> Iterator[Any]:
        """Batches from step `first` on, which `train` calls for."""
        for rows in islice(self._rows(strategy, seed), first, None):
            yield self.speech["train"].batch(rows, tokenizer)
