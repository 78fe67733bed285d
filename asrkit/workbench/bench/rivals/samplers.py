"""lhotse's samplers as arms of the suite of batching, on cuts that have lengths and no audio."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from asrkit.data import Buckets, Lengths
    from asrkit.data.batching.strategies import Strategy


class Epoch(NamedTuple):
    """The batches of an epoch: rows of the lengths."""

    steps: list[list[np.ndarray]]  # in each one a rank
    drawn: list[
        np.ndarray
        # as they were limited: lhotse splits those of an incomplete last step anew, one for each rank
    ]

    @property
    def batches(self) -> list[np.ndarray]:
        """Of all steps and ranks, in order."""
        return [rows for step in self.steps for rows in step]


def ours(cuts: Any, strategy: "Strategy", *, ranks: int) -> Any:
    """asrkit's LengthSampler of rank 0."""
    from asrkit.data import LengthSampler

    return LengthSampler(cuts, strategy, world_size=ranks, rank=0, seed=0)


def cuts_of(lengths: "Lengths") -> Any:
    """A lhotse CutSet: cut `row` is as long as that row says, and has a text of as many letters as
    it has tokens.
    """
    from lhotse import CutSet, MonoCut, SupervisionSegment

    return CutSet.from_cuts(
        MonoCut(
            str(row),
            0,
            D,
            0,
            supervisions=[SupervisionSegment(str(row), str(row), 0, D, text="x" * U)],
        )
        for row, (D, U) in enumerate(
            zip(lengths.seconds.tolist(), lengths.tokens.tolist(), strict=True)
        )
    )


def rows_of(cuts: Iterable[Any]) -> np.ndarray:
    """Rows of a batch of `cuts_of`; of a cut that lhotse repeats, to give every rank one, the row
    that it repeats.
    """
    return np.array([int(cut.id.partition("_")[0]) for cut in cuts])


def bucketing(cuts: Any, *, ranks: int, drop_last: bool = False, **limits: Any) -> Any:
    """lhotse's DynamicBucketingSampler of rank 0: 30 buckets, else its defaults; limited by
    max_duration or a constraint.
    """
    from lhotse.dataset.sampling import DynamicBucketingSampler

    buckets: dict[str, Any] = {"num_buckets": 30} | limits
    return DynamicBucketingSampler(
        cuts, shuffle=True, seed=0, world_size=ranks, rank=0, drop_last=drop_last, **buckets
    )


def nemo_like(cuts: Any, buckets: "Buckets", *, ranks: int, drop_last: bool = False) -> Any:
    """The same with fixed batch sizes of 2D buckets; without the cuts for which there is no bucket."""
    fixed = strict()(
        list(zip(buckets.seconds.tolist(), buckets.tokens.tolist(), strict=True)),
        buckets.sizes.tolist(),
    )

    def fits(cut: Any) -> bool:
        return fixed.select_bucket(None, cut) is not None

    sampler = bucketing(
        cuts,
        ranks=ranks,
        drop_last=drop_last,
        constraint=fixed,
        duration_bins=fixed.max_seq_len_buckets,
    )
    sampler.filter(fits)
    return sampler


@cache
def strict() -> Any:
    """Class of a lhotse constraint on 2D buckets (seconds, tokens), written after what NeMo
    documents of its own.

    The first duration that is long enough decides; of its cells the first with room for the tokens;
    where none has, None.
    """
    from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint

    class Strict(FixedBucketBatchSizeConstraint):
        current_bucket: Any

        def measure_length(self, example: Any) -> Any:
            return example.duration, len(example.supervisions[0].text)

        def add(
            self, example: Any
        ) -> None:  # lhotse's asks for the bucket again at each cut of a bucket, most of its time
            if self.current_bucket is None:
                self.current_bucket = self.select_bucket(None, example)
            self.num_cuts += 1

        def select_bucket(self, buckets: Any, example: Any = None, example_len: Any = None) -> Any:
            cells: Sequence[Any] = self.max_seq_len_buckets
            seconds, tokens = self.measure_length(example) if example_len is None else example_len
            at = bisect_left(
                cells, (seconds,)
            )  # the first cell of the first duration that is long enough
            if at == len(cells):
                return None
            place = bisect_left(cells, (cells[at][0], tokens), at)
            return place if place < len(cells) and cells[place][0] == cells[at][0] else None

    return Strict


def every_rank(sampler: Any, number: int) -> Epoch:
    """Epoch `number` of a lhotse sampler, with the batches of all ranks."""
    drawn, draw = list[Any](), sampler._next_batch

    def noted() -> Any:
        drawn.append(draw())
        return drawn[-1]

    sampler.set_epoch(number)
    # A rank draws the batches of all and keeps batches[rank]: here lhotse's own code keeps them
    # all.
    sampler.rank, sampler._next_batch, sampler._log_diagnostics = (
        slice(None),
        noted,
        lambda batches: None,
    )
    steps = [[rows_of(batch) for batch in step] for step in sampler]
    return Epoch(steps, [rows_of(batch) for batch in drawn])


def pace(sampler: Any, epochs: Sequence[Epoch]) -> tuple[list[float], list[float]]:
    """Milliseconds a step of rank 0, one number an epoch with all that comes before its first step;
    and of each later `next`.

    AssertionError where its batches are not those of `epochs`.
    """
    steps_ms, next_ms = list[float](), list[float]()
    for number, epoch in enumerate(epochs):
        sampler.set_epoch(number)
        batches, moments = [], [perf_counter()]
        for batch in sampler:
            moments.append(perf_counter())
            batches.append(batch)
        steps_ms.append(1e3 * (perf_counter() - moments[0]) / len(batches))
        next_ms += (1e3 * np.diff(moments[1:])).tolist()
        drawn, planned = (
            [rows_of(batch).tolist() for batch in batches],
            [step[0].tolist() for step in epoch.steps],
        )
        assert drawn == planned, (
            f"{type(sampler).__name__} draws other batches than those accounted for"
        )
    return steps_ms, next_ms
