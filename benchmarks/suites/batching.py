"""The batching suite: padding and time of samplers on the same lengths and memory limit.

All numbers except times are computed from lengths, a memory model and a compute model
(asrkit.data.batching.padding), without speech or a GPU:

    utilisation    useful compute over the compute of all ranks in the time of the slowest
    straggler      share of the ranks' time spent waiting for the slowest
    memory         mean share of the memory limit that a batch uses
    kept           share of the utterances in the epoch
    met_again      share of the pairs in one batch that share a batch in the next epoch too
    sampler_time   time of the sampler per step on one rank, including the work before the first

In an epoch with few steps, an incomplete last step has much weight.

A limit in seconds is found by bisection: the largest that keeps every batch of the measured epochs
within memory. That is only possible in hindsight, so it favours the arms that have one: random and
lhotse's.
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
    padding_account,
    plan,
    shipped_lengths,
    usual_rates,
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
MIN_UTTERANCES = 100  # in a table; lhotse needs one per bucket
ACCOUNTED = (  # recorded fields of data.Account
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


class BatchingArm(NamedTuple):
    """A sampler to compare."""

    name: str
    epoch: Callable[[int], Steps]  # number of an epoch to its batches
    sampler: Callable[[], Any] | None = None  # returns rank 0's sampler to time; None: not timed
    params: Mapping[str, Any] = {}  # further params of the records
    may_lose: bool = False  # whether it may lose or repeat utterances, as lhotse's samplers do


def suite(
    device: str, quick: bool, *, lengths: Path | None = None, ranks: Sequence[int] = ()
) -> Iterator[Case]:
    """Yield a comparison for each set of lengths and each number of ranks.

    Args:
        device: ignored, since nothing is computed on it.
        quick: one small set and few ranks.
        lengths: table of lengths to use instead of the shipped sets.
        ranks: numbers of ranks; () for the default ones.
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
        # in random order like a corpus: lhotse looks at 20,000 cuts at a time, which would all have
        # one length in a sorted table
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
    N = len(table)
    expect(N >= MIN_UTTERANCES, "lengths", f"at least {MIN_UTTERANCES} utterances", N)
    most = limit.share(1, table.seconds, table.tokens).max()
    wanted = "utterances that fit the limit of memory alone"
    expect(most <= 1, "lengths", wanted, f"{most:.2f} of it", "Cut long ones up.")
    expect(ranks <= N, "ranks", f"at most {N}, the number of utterances", ranks)


@dataclass(frozen=True)
class BatchingComparison:
    """All arms on one set of lengths, at one number of ranks."""

    name: str
    lengths: Lengths
    limit: Limit
    cuts: Any  # lhotse's cuts
    ranks: int

    def __str__(self) -> str:
        utterances = f"{len(self.lengths):,} utterances, {self.lengths.hours:.1f} h"
        return f"{self.name}, {utterances}, {self.ranks} ranks"

    def measurements(self) -> list[Measurement]:
        """Accounts of three epochs of each arm, and the time of its sampler.

        Raises:
            AssertionError: an arm has wrong batches.
        """
        with warnings.catch_warnings():
            # lhotse warns that cuts are in memory, and that a buffer may be small
            warnings.filterwarnings("ignore", module="lhotse")
            return [measurement for arm in self.arms() for measurement in self.measure(arm)]

    def measure(self, arm: BatchingArm) -> Iterator[Measurement]:
        """The measurements of one arm, one for each metric."""
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
        """Values of each metric, one per epoch; of `met_again` one per pair of epochs."""
        epochs = [arm.epoch(number) for number in range(EPOCHS)]
        samples = {"kept": [self.check(arm, steps) for steps in epochs]}
        if not min(samples["kept"]):  # drop_last may drop everything
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
        """The share of the utterances in an epoch of an arm.

        Raises:
            AssertionError: a rank has no batch in a step, a batch exceeds the limit, or utterances
                are lost or repeated although the arm may not lose any.
        """
        every_row = np.concatenate([np.empty(0), *batches_of(steps)])
        rows, counts = np.unique(every_row, return_counts=True)
        kept = len(rows) / len(self.lengths)
        repeated = int((counts - 1).sum())
        complete = all(len(step) == self.ranks and all(map(len, step)) for step in steps)
        # lhotse repeats some utterances if ranks would have no batch in the last step
        allowed = self.ranks - 1 if arm.may_lose else 0
        wrong = {
            "ranks without a batch": not complete,
            f"{kept:.3%} of the utterances": kept < 1 and not arm.may_lose,
            f"{repeated} utterances twice": repeated > allowed,
            "a batch above the limit": self.largest_share(steps) > 1,
        }
        faults = " and ".join(fault for fault, is_true in wrong.items() if is_true)
        assert not faults, f"{self}: {arm.name} was not recorded, because it has {faults}."
        return kept

    def largest_share(self, steps: Steps) -> float:
        """The share of the limit that the largest batch of an epoch uses."""
        D = self.lengths.seconds
        U = self.lengths.tokens
        shares = [
            float(self.limit.share(len(rows), D[rows].max(), U[rows].max()))
            for rows in batches_of(steps)
            if len(rows)
        ]
        return max(shares, default=0.0)

    def arms(self) -> Iterator[BatchingArm]:
        """The arms. Samplers that are not timed run the same code as a timed one."""
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
        """An arm of an asrkit strategy; `params` are recorded."""
        from asrkit.data import LengthSampler

        @cache
        def epoch(number: int) -> Steps:
            return plan(strategy, self.lengths, ranks=self.ranks, epoch=number).steps

        sampler = partial(LengthSampler, self.cuts, strategy, world_size=self.ranks, rank=0, seed=0)
        return BatchingArm(name, epoch, sampler if timed else None, params)

    def lhotses(self, name: str, make: Callable[..., Any], **options: Any) -> BatchingArm:
        """An arm of the lhotse sampler that `make` returns."""
        import lhotse

        sampler = partial(make, self.cuts, ranks=self.ranks, **options)

        @cache
        def epoch(number: int) -> Steps:
            return samplers.every_rank(sampler(), number)

        return BatchingArm(name, epoch, sampler, {"lhotse": lhotse.__version__}, may_lose=True)

    def with_largest_seconds(self, limited: Callable[[float], BatchingArm]) -> BatchingArm:
        """The arm with the largest limit in seconds (to 2 %) that keeps its epochs within memory.

        Args:
            limited: returns an arm with a limit in seconds.
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
        lengths: lengths of the utterances.
        limit: memory limit that determines the size of each bucket.
    """
    return buckets_2d(lengths.take(usual_rates(lengths)), limit, count=30, parts=5)


SUITE = Suite(name="batching", cases=suite, cpu_only=True)
