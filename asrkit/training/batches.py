"""Training batches: augmented features, prepared in a thread of their own ahead of their use."""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
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
from asrkit.training.lanes import lane_number

PLANS = 2**12  # numbers that tell plans apart; see `TrainingRun.agree`


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
    """Seed of all that is random in one step of a lane, so that a resumed run repeats it.

    Args:
        seed: Of the run.
        step: Number of the step; with several lanes, `lane_number`.
    """
    return seed * 1_000_003 + step


class Altered(NamedTuple):
    """Augmented `waveforms` (B, S) of `samples` (B,), and the generator of what else is drawn."""

    waveforms: Tensor
    samples: Tensor
    generator: torch.Generator


def alter_waveforms(batch: Batch, config: TrainConfig, step: int) -> Altered:
    """Augmented waveforms of a batch: the first part of `prepare_batch`.

    Args:
        batch: Waveforms.
        config: Augmentation and seed.
        step: Number of the step that the batch is for; with several lanes, `lane_number`.
    """
    generator = torch.Generator().manual_seed(step_seed(config.seed, step))
    waveforms, samples = augment(
        batch.waveforms, batch.sample_lengths, generator, config=config.augment
    )
    return Altered(waveforms, samples, generator)


def alter_features(
    batch: Batch, altered: Altered, features: Tensor, lengths: Tensor, config: TrainConfig
) -> Prepared:
    """Augmented features of a batch and its targets: the last part of `prepare_batch`.

    Args:
        batch: Targets.
        altered: Its waveforms, of which the features are.
        features: Log-mel features (B, T, F).
        lengths: Frames of each utterance (B,), on the host.
        config: Augmentation and features.
    """
    generator = altered.generator
    features, lengths = warp_features(
        features, lengths, generator, config=config.augment, mel=config.features
    )
    features = spec_augment(features, lengths, generator, config=config.augment)
    speech_s = float(altered.samples.sum()) / config.features.rate_hz
    return Prepared(features, lengths, batch.targets, batch.target_lengths, speech_s)


def prepare_batch(batch: Batch, config: TrainConfig, step: int) -> Prepared:
    """Augmented log-mel features of a batch, a function of (batch, seed, step) alone.

    Args:
        batch: Waveforms and targets.
        config: Augmentation, features and seed.
        step: Number of the step that the batch is for; with several lanes, `lane_number`.
    """
    altered = alter_waveforms(batch, config, step)
    features, lengths = log_mel(altered.waveforms, altered.samples, config=config.features)
    return alter_features(batch, altered, features, lengths, config)


class Drawn(NamedTuple):
    """The batches of a step, before features are computed.

    `own`, those of the lanes of this process; `ids`, of the utterances of all lanes.
    """

    own: list[Batch]
    ids: list[str]


Draw = Callable[[int, float], Drawn]  # of a step, given the longest utterance admitted, in seconds


class LaneBatches(NamedTuple):
    """What a process takes in a step.

    `own`, a batch for each of its lanes; `plan`, a number of 12 bits which is the same on all
    processes as long as they have planned the same for all lanes.
    """

    own: list[Prepared]
    plan: int


def draw_planned(
    utterances: Utterances, tokenizer: Tokenizer, config: TrainConfig, own: Sequence[int]
) -> Draw:
    """Draws batches of `TrainingPlan`.

    Args:
        utterances: At least one for each lane.
        tokenizer: Makes targets of the texts.
        config: Seconds of a batch, seed and lanes.
        own: Lanes of this process.
    """
    plan = TrainingPlan(
        utterances, batch_seconds=config.batch_seconds, seed=config.seed, lanes=config.lanes
    )

    def draw(step: int, longest_s: float) -> Drawn:
        rows = plan.rows(step, longest_s)
        ids = [utterances.ids[row] for lane in rows for row in lane]
        return Drawn([utterances.batch(rows[lane], tokenizer) for lane in own], ids)

    return draw


def draw_given(batches: Iterator[Batch], lanes: int, own: Sequence[int]) -> Draw:
    """Draws batches of somebody's own, as many for a step as there are lanes.

    Args:
        batches: In order, the same on all processes.
        lanes: Lanes of a step.
        own: Lanes of this process.

    Raises:
        ValueError: On drawing, where `batches` ended.
    """

    def draw(step: int, _: float) -> Drawn:
        taken = list(islice(batches, lanes))
        wanted = "batches without end"
        got = f"none for step {step}"
        expect(len(taken) == lanes, "batches", wanted, got, "Begin anew where they end.")
        ids = [id_ for batch in taken for id_ in batch.ids]
        return Drawn([taken[lane] for lane in own], ids)

    return draw


def prefetch(
    draw: Draw,
    config: TrainConfig,
    own: Sequence[int],
    first_step: int,
    longest_s: Callable[[int], float],
    *,
    depth: int = 2,
) -> Iterator[LaneBatches]:
    """Batches of the lanes of a process, step by step, prepared in a thread ahead of their use.

    Args:
        draw: Draws the batches of a step.
        config: Augmentation, features, seed and lanes.
        own: Lanes of this process.
        first_step: Number of the first step.
        longest_s: longest_s(k) is the longest utterance admitted at step k, in seconds. It is asked
            when a batch is taken: all processes have the same clock then.
        depth: Steps prepared ahead.
    """

    def prepared(step: int, longest: float) -> LaneBatches:
        drawn = draw(step, longest)
        batches = []
        for lane, batch in zip(own, drawn.own, strict=True):
            number = lane_number(step, lane, config.lanes)
            batches.append(prepare_batch(batch, config, number))
        plan = zlib.crc32("\n".join(drawn.ids).encode()) % PLANS
        return LaneBatches(batches, plan)

    pending = deque[Future[LaneBatches]]()
    with ThreadPoolExecutor(1) as pool:
        for step in count(first_step):
            pending.append(pool.submit(prepared, step, longest_s(step)))
            if len(pending) > depth:
                yield pending.popleft().result()
