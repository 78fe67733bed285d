"""Training batches: drawn, augmented, and prefetched by a background thread."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from asrkit.cuda_graphs import CAPTURING
from asrkit.data import Batch, Utterances, augment, spec_augment, warp_features
from asrkit.devices import to_device
from asrkit.features import log_mel
from asrkit.shapes import expect
from asrkit.text import Tokenizer
from asrkit.training.config import TrainConfig

if TYPE_CHECKING:
    from asrkit.training.epochs import Epochs
    from asrkit.training.loop import Run

PREFETCHED_STEPS = 2
CPU = torch.device("cpu")


class Prepared(NamedTuple):
    """A batch in the form that the model takes.

    `features` (B, T, F) float32 with `lengths` (B,) in frames; `targets` (B, U) with
    `target_lengths` (B,) in labels; `speech_s`, its seconds of speech without padding. All but the
    features are on the host.
    """

    features: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor
    speech_s: float

    @property
    def useful(self) -> int:
        """Frames of speech."""
        return int(self.lengths.sum())

    @property
    def computed(self) -> int:
        """Frames that the model computes, padding included; fewer if an LSTM runs in phases."""
        return self.features.shape[0] * self.features.shape[1]


def batch_seed(seed: int, number: int) -> int:
    """Seed of augmentation and dropout for one batch, so that a resumed run repeats it.

    Args:
        seed: Seed of the run.
        number: Number of the batch in the run. Batch `place` of step k has the number k n + place,
            n being the batches of a step.
    """
    return seed * 1_000_003 + number


def prepare_batch(
    batch: Batch, config: TrainConfig, number: int, device: torch.device = CPU
) -> Prepared:
    """Augmented log-mel features of a batch, a function of (batch, seed, number) alone.

    Waveforms are augmented on the host and copied to the device once, which computes the features.
    Lengths stay on the host, and nothing waits for a GPU.

    Args:
        batch: Waveforms and targets.
        config: Augmentation, features and seed.
        number: Number of the batch in the run.
        device: Device of the features.
    """
    generator = torch.Generator().manual_seed(batch_seed(config.seed, number))
    waveforms, samples = augment(
        batch.waveforms, batch.sample_lengths, generator, config=config.augment
    )
    with CAPTURING:  # no allocation of pinned memory while the training thread captures a graph
        waveforms = to_device(waveforms, device)
        features, lengths = log_mel(waveforms, samples, config=config.features)
        features, lengths = warp_features(
            features, lengths, generator, config=config.augment, mel=config.features
        )
        features = spec_augment(features, lengths, generator, config=config.augment)
    speech_s = float(samples.sum()) / config.features.rate_hz
    return Prepared(features, lengths, batch.targets, batch.target_lengths, speech_s)


# draw(step, longest_s): the batches of this process, with utterances of at most longest_s seconds
Draw = Callable[[int, float], list[Batch]]


def draw_planned(
    utterances: Utterances, tokenizer: Tokenizer, epochs: "Epochs", own: range
) -> Draw:
    """Draw batches as they are planned.

    Args:
        utterances: The speech that the epochs are planned over.
        tokenizer: Encodes texts as targets.
        epochs: Plans the batches of each step.
        own: Places of this process's batches in a step.
    """

    def draw(step: int, longest_s: float) -> list[Batch]:
        rows = epochs.rows(step, longest_s)
        return [utterances.batch(rows[place], tokenizer) for place in own]

    return draw


def draw_supplied(batches: Iterator[Batch], own: range, count: int) -> Draw:
    """Draw batches that the user supplies.

    Args:
        batches: Batches in order, the same in all processes.
        own: Places of this process's batches in a step.
        count: Batches of a step, over all processes.

    Raises:
        ValueError: On drawing, if `batches` has ended.
    """

    def draw(step: int, _: float) -> list[Batch]:
        drawn = list(itertools.islice(batches, count))
        remedy = "Start over where they end."
        got = f"none for step {step}"
        expect(len(drawn) == count, "batches", "batches without end", got, remedy)
        return [drawn[place] for place in own]

    return draw


def prefetch(draw: Draw, run: "Run", device: torch.device) -> Iterator[list[Prepared]]:
    """Yield the batches of this process, step by step. A thread prepares them ahead of their use.

    Args:
        draw: Draws the batches of a step.
        run: The run, from whose next step on batches are drawn. Its `longest_s` is called when a
            batch is taken, since all processes have the same clock then.
        device: Device of the features.
    """

    def prepared(step: int, longest_s: float) -> list[Prepared]:
        pairs = zip(run.places, draw(step, longest_s), strict=True)
        first = step * run.batches
        return [prepare_batch(batch, run.config, first + place, device) for place, batch in pairs]

    pending = deque[Future[list[Prepared]]]()
    with ThreadPoolExecutor(1) as pool:
        for step in itertools.count(run.step):
            pending.append(pool.submit(prepared, step, run.longest_s(step)))
            if len(pending) > PREFETCHED_STEPS:
                yield pending.popleft().result()
