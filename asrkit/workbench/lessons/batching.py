"""What notebook 08_batching measures and draws beyond its cells."""

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

LIMITS = 12  # sizes of a balanced batch that are tried


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


def repeated_share(strategy: Strategy, lengths: Lengths, *, seed: int = 0) -> float:
    """The share of the pairs of utterances in one batch that are in one batch again next epoch."""
    epochs = (plan(strategy, lengths, seed=seed, epoch=epoch).steps for epoch in (0, 1))
    return repeated_pairs(*epochs)


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
    """A small model, trained on the batches of one strategy.

    Attributes:
        utterances: Read in training, repetitions included.
        padded_s: Seconds computed after each step, padding included.
        losses: Of each step, in nats per label.
        training_s: Wall time of the steps.
        wer: Word error rate of voices that it was not trained on.
    """

    utterances: int
    padded_s: np.ndarray
    losses: list[float]
    training_s: float
    wer: float


@dataclass(frozen=True, kw_only=True)
class BatchedTraining:
    """Trains one small model on batches of any strategy, over the same utterances.

    Attributes:
        speech: "train" and "dev".
        lengths: Of the training set, in its order.
        config: Of the model.
        passes: Over the training set.
        threads: Of torch.
    """

    speech: dict[str, Utterances]
    lengths: Lengths
    config: TransducerConfig
    passes: int
    threads: int

    def steps(self, strategy: Strategy, seed: int) -> int:
        """Steps of all passes.

        Args:
            strategy: Makes the batches.
            seed: Of the batches.
        """
        epochs = islice(self._epochs(strategy, seed), self.passes)
        return sum(len(epoch.steps) for epoch in epochs)

    def balanced_with_steps(self, steps: int, most_s: float, seed: int) -> Strategy:
        """Balanced batches that make about as many steps.

        Args:
            steps: That are wanted.
            most_s: Largest limit of a batch that is tried, in padded seconds.
            seed: Of the batches.
        """
        limits = np.linspace(self.lengths.seconds.max(), most_s, LIMITS)
        strategies = [Balanced(limit=at_most_seconds(float(limit))) for limit in limits]
        return min(strategies, key=lambda one: abs(self.steps(one, seed) - steps))

    def run(self, strategy: Strategy, seed: int) -> BatchedRun:
        """Train from scratch, and evaluate.

        Args:
            strategy: Makes the batches.
            seed: Of weights and batches.
        """
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
        words = evaluate(load_checkpoint(result.path), self.speech["dev"]).errors
        drawn = [self.lengths.seconds[rows] for rows in islice(self._rows(strategy, seed), steps)]
        padded_s = [len(seconds) * seconds.max() for seconds in drawn]
        return BatchedRun(
            utterances=sum(map(len, drawn)),
            padded_s=np.cumsum(padded_s),
            losses=[step["loss"] for step in result.history],
            training_s=result.history[-1]["seconds"],
            wer=words.rate,
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
        """Batches from step `first` on, as `train` asks for them."""
        for rows in islice(self._rows(strategy, seed), first, None):
            yield self.speech["train"].batch(rows, tokenizer)
