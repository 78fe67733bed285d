"""Training batches: augmented features, prepared in a thread of their own ahead of their use."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.data import (
    Batch,
    TrainingPlan,
    Utterances,
    augment,
    spec_augment,
    warp_features,
)
from asrkit.features import log_mel
from asrkit.shapes import expect
from asrkit.text import Tokenizer
from asrkit.training.config import TrainConfig

AHEAD = 2  # steps that are prepared before they are taken


class Prepared(NamedTuple):
    """A batch as the model takes it.

    `features` (B, T, F) float32 with `lengths` (B,) in frames; `targets` (B, U) with
    `target_lengths` (B,) in labels; `speech_s`, the seconds of speech in it, padding left out.
    """

    features: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor
    speech_s: float


def step_seed(seed: int, number: int) -> int:
    """Seed of all that is random about one batch, so that a resumed run repeats it.

    Args:
        seed: Of the run.
        number: Of the batch in the run: of step k with n batches, k n + place.
    """
    return seed * 1_000_003 + number


def prepare_batch(batch: Batch, config: TrainConfig, number: int) -> Prepared:
    """Augmented log-mel features of a batch, a function of (batch, seed, number) alone.

    Args:
        batch: Waveforms and targets.
        config: Augmentation, features and seed.
        number: Of the batch in the run.
    """
    generator = torch.Generator().manual_seed(step_seed(config.seed, number))
    waveforms, samples = augment(
        batch.waveforms, batch.sample_lengths, generator, config=config.augment
    )
    features, lengths = log_mel(waveforms, samples, config=config.features)
    features, lengths = warp_features(
        features, lengths, generator, config=config.augment, mel=config.features
    )
    features = spec_augment(features, lengths, generator, config=config.augment)
    speech_s = float(samples.sum()) / config.features.rate_hz
    return Prepared(features, lengths, batch.targets, batch.target_lengths, speech_s)


# The batches that a process takes in a step, given the longest utterance admitted, in seconds
Draw = Callable[[int, float], list[Batch]]


def draw_planned(
    utterances: Utterances, tokenizer: Tokenizer, config: TrainConfig, own: range, count: int
) -> Draw:
    """Draws batches of `TrainingPlan`.

    Args:
        utterances: At least one for each batch of a step.
        tokenizer: Makes targets of the texts.
        config: Seconds of a batch, and seed.
        own: Numbers of the batches of this process.
        count: Batches of a step.
    """
    plan = TrainingPlan(
        utterances, batch_seconds=config.batch_seconds, seed=config.seed, batches=count
    )

    def draw(step: int, longest_s: float) -> list[Batch]:
        rows = plan.rows(step, longest_s)
        return [utterances.batch(rows[place], tokenizer) for place in own]

    return draw


def draw_given(batches: Iterator[Batch], own: range, count: int) -> Draw:
    """Draws batches of somebody's own.

    Args:
        batches: In order, the same on all processes.
        own: Numbers of the batches of this process.
        count: Batches of a step.

    Raises:
        ValueError: On drawing, where `batches` ended.
    """

    def draw(step: int, _: float) -> list[Batch]:
        taken = list(itertools.islice(batches, count))
        remedy = "Begin anew where they end."
        got = f"none for step {step}"
        expect(len(taken) == count, "batches", "batches without end", got, remedy)
        return [taken[place] for place in own]

    return draw


def prefetch(
    draw: Draw,
    config: TrainConfig,
    own: range,
    count: int,
    first_step: int,
    longest_s: Callable[[int], float],
) -> Iterator[list[Prepared]]:
    """Batches of a process, step by step, prepared in a thread ahead of their use.

    Args:
        draw: Draws the batches of a step.
        config: Augmentation, features and seed.
        own: Numbers of the batches of this process.
        count: Batches of a step.
        first_step: Number of the first step.
        longest_s: longest_s(k) is the longest utterance admitted at step k, in seconds. It is asked
            when a batch is taken: all processes have the same clock then.
    """

    def prepared(step: int, longest: float) -> list[Prepared]:
        pairs = zip(own, draw(step, longest), strict=True)
        return [prepare_batch(batch, config, step * count + place) for place, batch in pairs]

    pending = deque[Future[list[Prepared]]]()
    with ThreadPoolExecutor(1) as pool:
        for step in itertools.count(first_step):
            pending.append(pool.submit(prepared, step, longest_s(step)))
            if len(pending) > AHEAD:
                yield pending.popleft().result()
