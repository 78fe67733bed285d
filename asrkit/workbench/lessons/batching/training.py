"""A small model trained on the batches of one strategy after another, over the same utterances."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np

from asrkit import files
from asrkit.data import Balanced, Lengths, Utterances, at_most_seconds, plan
from asrkit.data.batching.strategies import Strategy
from asrkit.models import TransducerConfig, load_checkpoint
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, evaluate, train

LIMITS = 12  # sizes of a balanced batch that are tried


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
