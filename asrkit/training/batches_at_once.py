"""Training batches whose features are computed several at once, ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

import torch
import torch.nn.functional as F

from asrkit.data import Batch
from asrkit.features import frame_lengths, log_mel
from asrkit.shapes import expect, whole
from asrkit.training.batches import Prepared, alter_features, alter_waveforms
from asrkit.training.config import TrainConfig


def prepare_batches(
    batches: Sequence[Batch],
    config: TrainConfig,
    first_step: int,
    *,
    device: str | torch.device = "cpu",
) -> list[Prepared]:
    """`prepare_batch` of each of several batches; their features are computed in one call.

    Args:
        batches: Waveforms and targets of at least one batch.
        config: Augmentation, features and seed.
        first_step: Number of the step that the first batch is for; the others are for those after.
        device: Where the features are computed, and left. Waveforms are augmented on the host, and
            lengths and targets stay there.
    """
    altered = [
        alter_waveforms(batch, config, step) for step, batch in enumerate(batches, first_step)
    ]
    longest = max(one.waveforms.shape[1] for one in altered)
    padded = [F.pad(one.waveforms, (0, longest - one.waveforms.shape[1])) for one in altered]
    waveforms = torch.cat(padded).to(device)
    samples = torch.cat([one.samples for one in altered]).to(device)
    features, _ = log_mel(waveforms, samples, config=config.features)
    sizes = [len(one.samples) for one in altered]
    prepared = []
    for batch, one, of_batch in zip(batches, altered, features.split(sizes), strict=True):
        T = config.features.frames(one.waveforms.shape[1])
        lengths = frame_lengths(one.samples, config.features)
        prepared.append(alter_features(batch, one, of_batch[:, :T], lengths, config))
    return prepared


def ahead(
    batches: Iterator[Batch],
    config: TrainConfig,
    first_step: int = 0,
    *,
    factor: int = 1,
    depth: int = 2,
    device: str | torch.device = "cpu",
) -> Iterator[Prepared]:
    """`prepare_batch` of each batch in order, computed in a thread ahead of its use.

    With a `factor` above 1 the features of so many batches are computed in one call and cut up
    afterwards, which MLPerf's rounds call a batch multiplier. Each batch is what it would be by
    itself but for rounding: augmentation follows from (seed, step), and features are normalised by
    utterance. On a GPU that is a `factor`th of the launches. A CPU takes longer than one by one:
    the shorter batches are padded to the longest.

    Args:
        batches: Batches without end, the first of them for `first_step`.
        config: Augmentation, features and seed.
        first_step: Number of the first step.
        factor: Batches whose features are computed at once.
        depth: Calls that are computed ahead, of `factor` batches each.
        device: Where the features are computed, and left.

    Raises:
        ValueError: `batches` ended, or `factor` is below 1.
    """
    expect(whole(factor, 1), "factor", "a whole number of at least 1", repr(factor))

    def next_prepared(step: int) -> list[Prepared]:
        group = list(islice(batches, factor))
        got = f"none for step {step + len(group)}"
        remedy = "Begin anew where they end."
        expect(len(group) == factor, "batches", "batches without end", got, remedy)
        return prepare_batches(group, config, step, device=device)

    return _in_a_thread(next_prepared, count(first_step, factor), depth)


def _in_a_thread(
    prepare: Callable[[int], list[Prepared]], steps: Iterator[int], depth: int
) -> Iterator[Prepared]:
    """What `prepare` returns for each of `steps`, one by one, computed `depth` calls ahead."""
    pending = deque[Future[list[Prepared]]]()
    with ThreadPoolExecutor(1) as pool:
        for step in steps:
            pending.append(pool.submit(prepare, step))
            if len(pending) > depth:
                yield from pending.popleft().result()
