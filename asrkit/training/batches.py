"""Training batches: augmented features, prepared in a thread of their own ahead of their use."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.data import Batch, augment, spec_augment
from asrkit.features import log_mel
from asrkit.shapes import expect
from asrkit.training.config import TrainConfig


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


def step_seed(seed: int, step: int) -> int:
    """Seed of all that is random in one step, so that a resumed run repeats it."""
    return seed * 1_000_003 + step


def prepare_batch(batch: Batch, config: TrainConfig, step: int) -> Prepared:
    """Augmented log-mel features of a batch, a function of (batch, seed, step) alone.

    Args:
        batch: Waveforms and targets.
        config: Augmentation, features and seed.
        step: Number of the step that the batch is for.
    """
    generator = torch.Generator().manual_seed(step_seed(config.seed, step))
    waveforms, samples = augment(
        batch.waveforms, batch.sample_lengths, generator, config=config.augment
    )
    features, lengths = log_mel(waveforms, samples, config=config.features)
    features = spec_augment(features, lengths, generator, config=config.augment)
    speech_s = float(samples.sum()) / config.features.rate_hz
    return Prepared(features, lengths, batch.targets, batch.target_lengths, speech_s)


def prefetch(
    batches: Iterator[Batch], config: TrainConfig, first_step: int, *, depth: int = 2
) -> Iterator[Prepared]:
    """`prepare_batch` of each batch in order, computed in a thread ahead of its use.

    Args:
        batches: Batches without end, the first of them for `first_step`.
        config: Augmentation, features and seed.
        first_step: Number of the first step.
        depth: Batches prepared ahead.

    Raises:
        ValueError: `batches` ended.
    """

    def next_prepared(step: int) -> Prepared:
        batch = next(batches, None)
        got = f"none for step {step}"
        remedy = "Begin anew where they end."
        expect(batch is not None, "batches", "batches without end", got, remedy)
        assert batch is not None  # for mypy
        return prepare_batch(batch, config, step)

    pending = deque[Future[Prepared]]()
    with ThreadPoolExecutor(1) as pool:
        for step in count(first_step):
            pending.append(pool.submit(next_prepared, step))
            if len(pending) > depth:
                yield pending.popleft().result()
