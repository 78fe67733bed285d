"""Batches of a run before any sound is read: the strategy, sizes from memory, and epochs."""

from typing import TYPE_CHECKING

import numpy as np

from asrkit.data import (
    Balanced,
    Bucketed,
    Buckets,
    Lengths,
    Presorted,
    Random,
    at_most_seconds,
    at_most_utterances,
    buckets_1d,
    buckets_2d,
    linear,
    oom_search,
    plan,
)
from asrkit.data.batching.strategies import Batches, Constraint, Strategy
from asrkit.shapes import expect, whole
from asrkit.training.config import TrainConfig
from asrkit.training.optimizer import training_step

if TYPE_CHECKING:
    from asrkit.training.loop import Run

BLUR = (0.1, 0.0)  # of seconds; tokens do not count: utterances of similar tokens share words
Epoch = tuple[int, float]  # first step, and seconds of the longest utterance that it admits


class Epochs:
    """The batches of each step of a training without end, epoch after epoch.

    An epoch is planned over the utterances that the length curriculum admits when it begins. It
    ends early once the curriculum admits utterances twice as long: a large corpus may need the
    whole run for an epoch. A step is a function of (seed, step, `begun`), so a resumed run repeats
    its batches without drawing earlier ones.

    Args:
        lengths: Lengths of at least one utterance for each batch of a step.
        strategy: Divides the utterances of an epoch into batches.
        ranks: Batches of a step, over all processes.
        seed: Seed of the plans.
        step_s: Seconds of speech that fill a step. The shortest utterances that add up to it are
            always admitted.
        begun: Epochs that have begun. Further ones are appended to it.

    Raises:
        ValueError: There are fewer utterances than batches in a step.
    """

    def __init__(
        self,
        lengths: Lengths,
        strategy: Strategy,
        *,
        ranks: int,
        seed: int,
        step_s: float,
        begun: list[Epoch],
    ) -> None:
        N = len(lengths)
        wanted = f"from 1 to the number of utterances, {N}"
        remedy = "Each process, and each of --accumulate, takes a batch of a step."
        expect(whole(ranks, 1, N), "batches", wanted, ranks, remedy)
        self.lengths = lengths
        self.strategy = strategy
        self.ranks = ranks
        self.seed = seed
        self.begun = begun
        ascending = np.sort(lengths.seconds)
        filled = int(np.searchsorted(np.cumsum(ascending), step_s))
        self.always_s = float(ascending[min(max(filled, ranks - 1), N - 1)])
        self.longest_s = float(ascending[-1])
        self.steps: list[Batches] = []  # of the last epoch that has begun
        if begun:
            self._plan()

    def rows(self, step: int, longest_s: float = np.inf) -> Batches:
        """Rows of the utterances of each batch of a step.

        Args:
            step: Number of the step. Steps are called in order, from one of the last epoch in
                `begun` on.
            longest_s: Longest utterance that the curriculum admits, in seconds.
        """
        admitted_s = min(max(self.always_s, longest_s), self.longest_s)
        first, planned_s = self.begun[-1] if self.begun else (step, admitted_s)
        if step - first >= len(self.steps) or admitted_s > 2 * planned_s:
            self.begun.append((step, admitted_s))
            self._plan()
            first = step
        return self.steps[step - first]

    def _plan(self) -> None:
        """Plan the last epoch that has begun."""
        admitted = np.flatnonzero(self.lengths.seconds <= self.begun[-1][1])
        lengths = self.lengths.take(admitted)
        epoch = len(self.begun) - 1
        planned = plan(self.strategy, lengths, ranks=self.ranks, seed=self.seed, epoch=epoch)
        self.steps = [[admitted[rows] for rows in step] for step in planned.steps]


def planned_epochs(run: "Run", lengths: Lengths, *, progress: bool) -> Epochs:
    """The epochs of a run, by the strategy and the sizes that its settings name.

    Args:
        run: A run before its first step, or resumed.
        lengths: Lengths of its training speech.
        progress: Whether to show the progress of a search.
    """
    config = run.config
    if run.sizes is None and (config.memory is not None or config.bucket_sizes is not None):
        run.sizes = run.processes.in_first(lambda: _sizes(run, lengths, progress))
    sizes = run.sizes
    if sizes is not None:
        too_large = int((sizes.cell(lengths) < 0).sum())
        wanted = "room for each utterance of the training speech"
        remedy = "Search the sizes for this speech, by --memory."
        expect(not too_large, "bucket_sizes", wanted, f"{too_large} too large", remedy)
    batch_s = config.batch_seconds
    if sizes is not None:
        batch_s = float((sizes.seconds * sizes.sizes).max())
    return Epochs(
        lengths,
        make_strategy(config, lengths, sizes),
        ranks=run.batches,
        seed=config.seed,
        step_s=run.batches * batch_s,
        begun=run.epochs,
    )


def make_strategy(config: TrainConfig, lengths: Lengths, sizes: Buckets | None) -> Strategy:
    """The strategy that `config.batching` names.

    Args:
        config: Strategy, number of buckets and seconds of a batch.
        lengths: Lengths of the training speech.
        sizes: Buckets whose sizes limit batches instead of `config.batch_seconds`.
    """
    limit: Constraint = sizes or at_most_seconds(config.batch_seconds)
    if config.batching == "random":
        return Random(limit=limit)
    if config.batching == "presorted":
        most = sizes.sizes.min() if sizes else config.batch_seconds // lengths.seconds.max()
        return Presorted(Random(limit=at_most_utterances(max(1, int(most)))))
    if config.batching == "balanced":
        return Balanced(limit=limit, work=linear(), blur=BLUR)
    return Bucketed(buckets=sizes or _buckets(config, lengths))


def _buckets(config: TrainConfig, lengths: Lengths) -> Buckets:
    """Buckets of batches of at most `config.batch_seconds`."""
    make = buckets_1d if config.batching == "bucketed" else buckets_2d
    return make(lengths, at_most_seconds(config.batch_seconds), count=config.buckets)


def _sizes(run: "Run", lengths: Lengths, progress: bool) -> Buckets:
    """Buckets with the sizes of `bucket_sizes`, else searched for."""
    config = run.config
    if config.bucket_sizes is not None:
        return Buckets.read(config.bucket_sizes)
    assert config.memory is not None
    step = training_step(run.model, run.optimizer, config)
    device = next(run.model.parameters()).device
    try:
        found = oom_search(
            lambda n, seconds, tokens: step(n, config.augment.longest_s(seconds), tokens),
            _buckets(config, lengths),
            budget_bytes=int(config.memory * 2**30),
            device=str(device),
            state=(run.model, run.optimizer),
            progress=progress,
        )
    except ValueError as error:  # about the budget, whose name is `memory` here
        raise ValueError(str(error).replace("budget_bytes:", "memory:", 1)) from None
    return found.table
