"""lhotse's samplers as arms of the batching suite, on cuts with lengths and without audio."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asrkit.data import Buckets, Lengths


Steps = Sequence[Sequence[np.ndarray]]  # steps[k][rank]: a batch, as row numbers of the lengths


def batches_of(steps: Steps) -> list[np.ndarray]:
    """Batches of all steps and ranks, in order."""
    return [rows for step in steps for rows in step]


def cuts_of(lengths: "Lengths") -> Any:
    """A lhotse CutSet of these lengths, without audio.

    The id of a cut is its row number, and its text has one letter per token.
    """
    from lhotse import CutSet, MonoCut, SupervisionSegment

    cuts = []
    pairs = zip(lengths.seconds.tolist(), lengths.tokens.tolist(), strict=True)
    for row, (seconds, tokens) in enumerate(pairs):
        name = str(row)
        supervision = SupervisionSegment(name, name, 0, seconds, text="x" * tokens)
        cuts.append(MonoCut(name, 0, seconds, 0, supervisions=[supervision]))
    return CutSet.from_cuts(cuts)


def rows_of(cuts: Iterable[Any]) -> np.ndarray:
    """Row numbers of a batch of `cuts_of`.

    lhotse repeats a cut where a rank would have none; the copy keeps the row number.
    """
    return np.array([int(cut.id.partition("_")[0]) for cut in cuts])


def bucketing(cuts: Any, *, ranks: int, drop_last: bool = False, **limits: Any) -> Any:
    """lhotse's DynamicBucketingSampler of rank 0, with 30 buckets.

    Args:
        cuts: cuts of `cuts_of`.
        ranks: number of ranks.
        drop_last: omit incomplete batches and steps.
        limits: max_duration of a batch or a constraint, and other options of the sampler.
    """
    from lhotse.dataset.sampling import DynamicBucketingSampler

    options = {"num_buckets": 30} | limits
    return DynamicBucketingSampler(
        cuts, shuffle=True, seed=0, world_size=ranks, rank=0, drop_last=drop_last, **options
    )


def nemo_like(cuts: Any, buckets: "Buckets", *, ranks: int, drop_last: bool = False) -> Any:
    """lhotse's DynamicBucketingSampler with fixed batch sizes, as NeMo uses it.

    Args:
        cuts: cuts of `cuts_of`; those that fit no bucket are left out.
        buckets: 2D buckets and their sizes.
        ranks: number of ranks.
        drop_last: omit incomplete batches and steps.
    """
    shapes = list(zip(buckets.seconds.tolist(), buckets.tokens.tolist(), strict=True))
    constraint = strict()(shapes, buckets.sizes.tolist())

    def fits(cut: Any) -> bool:
        return constraint.select_bucket(None, cut) is not None

    sampler = bucketing(
        cuts,
        ranks=ranks,
        drop_last=drop_last,
        constraint=constraint,
        duration_bins=constraint.max_seq_len_buckets,
    )
    sampler.filter(fits)
    return sampler


@cache
def strict() -> Any:
    """Class of a lhotse constraint on 2D buckets (seconds, tokens), after NeMo's documentation.

    The first duration that is long enough decides: a cut gets its first cell with room for the
    tokens, or none.
    """
    from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint

    class Strict(FixedBucketBatchSizeConstraint):
        current_bucket: Any

        def measure_length(self, example: Any) -> Any:
            return example.duration, len(example.supervisions[0].text)

        def add(self, example: Any) -> None:
            # lhotse's own method looks up the bucket for each cut, which takes most of its time
            if self.current_bucket is None:
                self.current_bucket = self.select_bucket(None, example)
            self.num_cuts += 1

        def select_bucket(self, buckets: Any, example: Any = None, example_len: Any = None) -> Any:
            """The cell that an example fits into; None if there is none.

            Args:
                buckets: ignored; part of lhotse's signature.
                example: a cut.
                example_len: its seconds and tokens, if known.
            """
            cells = self.max_seq_len_buckets
            seconds, tokens = example_len or self.measure_length(example)
            first = bisect_left(
                cells, (seconds,)
            )  # first cell of the first duration that is long enough
            if first == len(cells):
                return None
            longest = cells[first][0]
            cell = bisect_left(cells, (longest, tokens), first)
            has_room = cell < len(cells) and cells[cell][0] == longest
            return cell if has_room else None

    return Strict


def every_rank(sampler: Any, number: int) -> Steps:
    """The batches of all ranks in one epoch of a lhotse sampler.

    A rank of lhotse draws the batches of all ranks and keeps batches[rank]. With a slice as the
    rank, lhotse's own code keeps them all.

    Args:
        sampler: sampler of any rank; it cannot be used otherwise afterwards.
        number: number of the epoch.
    """
    sampler.set_epoch(number)
    sampler.rank = slice(None)
    sampler._log_diagnostics = lambda batches: None
    return [[rows_of(batch) for batch in step] for step in sampler]


def pace(sampler: Any, epochs: Sequence[Steps]) -> list[float]:
    """Time the steps of a sampler of rank 0.

    Args:
        sampler: sampler of rank 0.
        epochs: the batches that it should draw.

    Returns:
        For each epoch, milliseconds per step, including the work before the first step.

    Raises:
        AssertionError: the sampler draws other batches than those of `epochs`.
    """
    steps_ms: list[float] = []
    for number, steps in enumerate(epochs):
        sampler.set_epoch(number)
        start = perf_counter()
        batches = [*sampler]
        steps_ms.append(1e3 * (perf_counter() - start) / len(batches))
        drawn = [rows_of(batch).tolist() for batch in batches]
        planned = [step[0].tolist() for step in steps]
        name = type(sampler).__name__
        assert drawn == planned, f"{name} draws other batches than those accounted for"
    return steps_ms
