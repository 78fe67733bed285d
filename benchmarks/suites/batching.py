"""The suite of batching: samplers on the same lengths, under one limit of memory. What they pad,
and what a step of them costs.

All numbers but times follow from lengths, a model of memory and one of compute
(asrkit.data.batching.padding): no speech, no GPU. `utilisation` is useful compute over what the
ranks could have done while the slowest of each step was at work, `straggler` the share of their
time spent waiting for it, `memory` the mean share of the limit that a batch uses; `kept` is the
share of the utterances; `met_again`, of the pairs that share a batch, those that do in the next
epoch too; `sampler_time` a step of the sampler on one rank with what comes before the first. Where
an epoch has few steps, an incomplete last one weighs much.

A limit in seconds is the largest that bisection finds to keep every batch of the very epochs
accounted for within memory. Who sets one beforehand has to stay below it, so the arms that have
one, random and lhotse's, are flattered.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from asrkit.data import (
    CANARY_COMPUTE,
    CANARY_MEMORY,
    Buckets,
    Lengths,
    Limit,
    buckets_2d,
    duration_bins,
    padding_account,
    plan,
    shipped_lengths,
    web_like,
)
from asrkit.data.batching.strategies import Strategy
from asrkit.shapes import expect
from asrkit.workbench.lessons.shared.repeated_pairs import repeated_pairs
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case, Suite
from benchmarks.peers import samplers
from benchmarks.peers.samplers import Steps, batches_of

RANKS = (1, 8, 64, 1024)
SETS = ("librispeech_train_clean_100", "librispeech_eval", "ami_segments")
EPOCHS = 3
FEWEST = 100  # utterances of a table: lhotse wants one a bucket
# Fields of data.Account that are recorded.
ACCOUNTED = (
    "utilisation",
    "straggler",
    "memory",
    "memory_max",
    "audio_padding",
    "token_padding",
    "lattice_padding",
    "compute_padding",
    "batch_size",
    "steps",
)
UNITS = {"batch_size": "utterances", "steps": "steps", "sampler_time": "ms"}
# Standard deviations of the tokens per second within a duration, from which on NeMo's estimate
# leaves an utterance out.
OUTLIER = 4.0


class BatchingArm(NamedTuple):
    """A way to batch."""

    name: str
    epoch: Callable[[int], Steps]  # the batches of an epoch, by its number
    sampler: Callable[[], Any] | None = None  # makes the one of rank 0; None: it is not timed
    params: Mapping[str, Any] = {}  # recorded beside the metrics
    # Another library's: what it loses is recorded, where ours would be refused for it.
    theirs: bool = False


def suite(
    device: str, quick: bool, *, lengths: Path | None = None, ranks: Sequence[int] = ()
) -> Iterator[Case]:
    """A comparison for each set of lengths and each number of ranks.

    Args:
        device: Does not matter: nothing is computed on it.
        quick: Use one small set and few ranks.
        lengths: A table of one's own to use in place of the shipped sets.
        ranks: Numbers of ranks in place of the default ones.
    """
    ranks = ranks or RANKS[: 2 if quick else None]
    fewest = min(ranks)
    expect(fewest >= 1, "ranks", "1 or more", fewest)
    limit = Limit(CANARY_MEMORY, 1.0)
    if lengths is not None:
        table = Lengths.read(lengths)
        _check_own(table, limit, fewest)
        sets = {lengths.name.partition(".")[0]: table}
    elif quick:
        sets = {"web_like": web_like(4000)}
    else:
        sets = {"web_like": web_like(150_000)} | {name: shipped_lengths(name) for name in SETS}
    for name, table in sets.items():
        # As a corpus comes: lhotse, which looks at 20,000 cuts at a time, would find one length in
        # a sorted table.
        table = table.take(np.random.default_rng(0).permutation(len(table)))
        cuts = samplers.cuts_of(table)
        for count in ranks:
            if count > len(table):
                line = f"batching {name}: {len(table)} utterances are too few for {count} ranks"
                print(line, file=sys.stderr)
            else:
                comparison = BatchingComparison(name, table, limit, cuts, count)
                yield Case(what=f"batching {comparison}", measure=comparison.measurements)


def _check_own(table: Lengths, limit: Limit, ranks: int) -> None:
    expect(len(table) >= FEWEST, "lengths", f"at least {FEWEST} utterances", len(table))
    most = limit.share(1, table.seconds, table.tokens).max()
    wanted = "utterances that fit the limit of memory alone"
    expect(most <= 1, "lengths", wanted, f"{most:.2f} of it", "Cut long ones up.")
    expect(ranks <= len(table), "ranks", f"at most {len(table)}, the number of utterances", ranks)


@dataclass(frozen=True)
class BatchingComparison:
    """All arms on one set of lengths, at one number of ranks."""

    name: str
    lengths: Lengths
    limit: Limit
    cuts: Any  # of lhotse
    ranks: int

    def __str__(self) -> str:
        utterances = f"{len(self.lengths):,} utterances, {self.lengths.hours:.1f} h"
        return f"{self.name}, {utterances}, {self.ranks} ranks"

    def measurements(self) -> list[Measurement]:
        """Accounts of three epochs of each arm, and the time of its sampler.

        Raises:
            AssertionError: The batches of an arm are wrong.
        """
        with warnings.catch_warnings():
            # lhotse warns that cuts are in memory, and that a buffer may be small.
            warnings.filterwarnings("ignore", module="lhotse")
            return [measurement for arm in self.arms() for measurement in self.measure(arm)]

    def measure(self, arm: BatchingArm) -> Iterator[Measurement]:
        """Measurements of one arm, one for each metric that is recorded."""
        params = {
            "case": str(self),
            "set": self.name,
            "ranks": self.ranks,
            "utterances": len(self.lengths),
            "hours": self.lengths.hours,
            "seed": 0,
            "epochs": EPOCHS,
            "limit": f"{self.limit.cost.formula} <= {self.limit.most:g}",
            "compute": CANARY_COMPUTE.formula,
            **arm.params,
        }
        for metric, values in self._samples(arm).items():
            yield Measurement(
                "batching",
                metric,
                UNITS.get(metric, "fraction"),
                median(values),
                tuple(values),
                impl=arm.name,
                timer="time.perf_counter" if metric.endswith("time") else "",
                params=params,
            )

    def _samples(self, arm: BatchingArm) -> dict[str, list[float]]:
        """A value of each metric for each epoch of an arm; of `repeated_pairs` one for each two."""
        epochs = [arm.epoch(number) for number in range(EPOCHS)]
        samples = {"kept": [self.check(arm, steps) for steps in epochs]}
        if not min(samples["kept"]):  # drop_last may leave nothing
            return samples
        accounts = []
        for steps in epochs:
            pairs = [
                (self.lengths.seconds[rows], self.lengths.tokens[rows])
                for rows in batches_of(steps)
            ]
            accounts.append(
                padding_account(pairs, cost=CANARY_COMPUTE, limit=self.limit, ranks=self.ranks)
            )
        for metric in ACCOUNTED:
            samples[metric] = [getattr(account, metric) for account in accounts]
        samples["met_again"] = [repeated_pairs(*pair) for pair in itertools.pairwise(epochs)]
        if arm.sampler:
            samples["sampler_time"] = samplers.pace(arm.sampler(), epochs)
        return samples

    def check(self, arm: BatchingArm, steps: Steps) -> float:
        """The share of the utterances that an epoch of an arm holds.

        Raises:
            AssertionError: A rank has no batch in a step, a batch exceeds the limit, or (unless
                the arm is another library's) utterances are lost or occur twice.
        """
        every_row = np.concatenate([np.empty(0), *batches_of(steps)])
        rows, counts = np.unique(every_row, return_counts=True)
        kept = len(rows) / len(self.lengths)
        repeated = int((counts - 1).sum())
        complete = all(len(step) == self.ranks and all(map(len, step)) for step in steps)
        # lhotse repeats some where the last step would leave ranks without a batch
        allowed = self.ranks - 1 if arm.theirs else 0
        wrong = {
            "ranks without a batch": not complete,
            f"{kept:.3%} of the utterances": kept < 1 and not arm.theirs,
            f"{repeated} utterances twice": repeated > allowed,
            "a batch above the limit": self.largest_share(steps) > 1,
        }
        found = " and ".join(what for what, here in wrong.items() if here)
        assert not found, f"{self}: {arm.name}, of which nothing was recorded, has {found}."
        return kept

    def largest_share(self, steps: Steps) -> float:
        """Share of the limit that the largest batch of an epoch uses."""
        D = self.lengths.seconds
        U = self.lengths.tokens
        shares = [
            float(self.limit.share(len(rows), D[rows].max(), U[rows].max()))
            for rows in batches_of(steps)
            if len(rows)
        ]
        return max(shares, default=0.0)

    def arms(self) -> Iterator[BatchingArm]:
        """The ways to batch that are compared; the samplers of those that are not timed run the
        same code.
        """
        from asrkit import data

        lengths = self.lengths
        limit = self.limit
        work = data.CANARY_COMPUTE
        safe_size = int(limit.largest(lengths.seconds.max(), lengths.tokens.max()))
        yield self.ours("random_safe_size", data.Random(limit=data.at_most_utterances(safe_size)))
        yield self.with_largest_seconds(
            lambda seconds: self.ours(
                "random_seconds", data.Random(limit=data.at_most_seconds(seconds))
            )
        )
        yield self.with_largest_seconds(
            lambda seconds: self.lhotses("lhotse_1d", samplers.bucketing, max_duration=seconds)
        )
        buckets = nemo_buckets(lengths, limit)
        nemo_like = partial(samplers.nemo_like, buckets=buckets)
        yield self.lhotses("nemo_like_2d", nemo_like)
        dropping = self.lhotses("nemo_like_2d_drop_last", nemo_like, drop_last=True)
        yield dropping._replace(sampler=None)
        buckets = data.buckets_2d(lengths, limit)
        bucketed = data.Bucketed(buckets=buckets, work=work)
        yield self.ours("bucketed_2d", bucketed, timed=True, cells=len(buckets))
        blur = data.Balanced.blur
        yield self.ours("balanced", data.Balanced(limit=limit, work=work), timed=True, blur=blur)

    def ours(
        self, name: str, strategy: Strategy, timed: bool = False, **params: Any
    ) -> BatchingArm:
        """An arm of a strategy of asrkit; `params` are recorded."""
        from asrkit.data import LengthSampler

        @cache
        def epoch(number: int) -> Steps:
            return plan(strategy, self.lengths, ranks=self.ranks, epoch=number).steps

        sampler = partial(LengthSampler, self.cuts, strategy, world_size=self.ranks, rank=0, seed=0)
        return BatchingArm(name, epoch, sampler if timed else None, params)

    def lhotses(self, name: str, make: Callable[..., Any], **options: Any) -> BatchingArm:
        """An arm of the sampler of lhotse that `make` makes."""
        import lhotse

        sampler = partial(make, self.cuts, ranks=self.ranks, **options)

        @cache
        def epoch(number: int) -> Steps:
            return samplers.every_rank(sampler(), number)

        return BatchingArm(name, epoch, sampler, {"lhotse": lhotse.__version__}, theirs=True)

    def with_largest_seconds(self, limited: Callable[[float], BatchingArm]) -> BatchingArm:
        """The arm with the largest limit in seconds, to 2 %, that keeps its epochs within memory.

        Args:
            limited: Makes an arm with a limit in seconds.
        """
        best = None
        low = 0.0
        high = self.limit.most / self.limit.cost.per_second
        while best is None or high > 1.02 * low:
            middle = (low + high) / 2
            arm = limited(middle)
            if all(self.largest_share(arm.epoch(number)) <= 1 for number in range(EPOCHS)):
                best = arm._replace(params={**arm.params, "max_seconds": middle})
                low = middle
            else:
                high = middle
        return best


def nemo_buckets(lengths: Lengths, limit: Limit) -> Buckets:
    """2D buckets as NeMo estimates them: 30 bins of seconds with 5 cells of tokens each.

    Utterances with far more tokens per second than others of their bin are left out.

    Args:
        lengths: Of the utterances.
        limit: Sizes each bucket.
    """
    bins = np.searchsorted(duration_bins(lengths, 30), lengths.seconds)
    rates = lengths.tokens_per_second
    count = np.bincount(bins)
    mean = (np.bincount(bins, rates) / count)[bins]
    deviation = np.sqrt(np.bincount(bins, (rates - mean) ** 2) / count)[bins]
    usual = lengths.take(rates - mean <= OUTLIER * deviation)
    return buckets_2d(usual, limit, count=30, parts=5)


SUITE = Suite(name="batching", cases=suite, cpu_only=True)
