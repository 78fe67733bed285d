"""The suite of batching: samplers on the same lengths, under one limit of memory. What they pad,
and what a step of them costs.

All numbers but times follow from lengths, a model of memory and one of compute
(asrkit.data.batching.padding): no speech, no GPU. `utilisation` is useful compute over what the
ranks could have done while the slowest of each step was at work, `straggler` the share of their
time spent waiting for it, `memory` the mean share of the limit that a batch uses; `kept` is the
share of the utterances; `met_again`, of the pairs that share a batch, those that do in the next
epoch too; `sampler_time` a step of the sampler on one rank with what comes before the first,
`next_time` one of the fifty calls after that. Where an epoch has few steps, an incomplete last one
weighs much.

A limit in seconds is the largest that bisection finds to keep every batch of the very epochs
accounted for within memory. Who sets one beforehand has to stay below it, so the arms that have
one, random and lhotse's, are flattered.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asrkit.shapes import expect
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.peers import samplers
from asrkit.workbench.bench.peers.samplers import Epoch
from asrkit.workbench.records import Measurement

if TYPE_CHECKING:
    from asrkit.data import Buckets, Lengths, Limit
    from asrkit.data.batching.strategies import Strategy

RANKS = (1, 8, 64, 1024)
EPOCHS = 3
FEWEST = 100  # utterances of a table: lhotse wants one a bucket
NEXT_CALLS = 50  # of the sampler, whose median time is recorded
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
UNITS = {"batch_size": "utterances", "steps": "steps", "sampler_time": "ms", "next_time": "ms"}
# The samplers of the other arms run the same code.
TIMED = ("lhotse_1d", "nemo_like_2d", "bucketed_2d", "balanced")
# Standard deviations of the tokens per second within a duration, from which on NeMo's estimate
# leaves an utterance out.
OUTLIER = 4.0


class BatchingArm(NamedTuple):
    """A way to batch."""

    name: str
    epoch: Callable[[int], Epoch]  # the batches of an epoch, by its number
    sampler: Callable[[], Any] | None  # makes the sampler of rank 0; None where it is not timed
    params: Mapping[str, Any]  # recorded beside the metrics
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
    if not ranks:
        ranks = RANKS
        if quick:
            ranks = RANKS[:2]
    expect(min(ranks) >= 1, "ranks", "1 or more", min(ranks))
    try:
        from asrkit.data import CANARY_MEMORY, Lengths, Limit
    except ImportError as error:
        _say(f"batching is left out: {error}")
        return
    limit = Limit(CANARY_MEMORY, 1.0)
    if lengths is None:
        sets = _shipped_sets(quick)
    else:
        sets = iter([(lengths.name.partition(".")[0], Lengths.read(lengths))])
    most_ranks = 0
    for name, table in sets:
        _check_set(table, limit)
        # As a corpus comes: lhotse, which looks at 20,000 cuts at a time, would find one length in
        # a sorted table.
        table = table.take(np.random.default_rng(0).permutation(len(table)))
        cuts = _lhotse_cuts(table)
        most_ranks = max(most_ranks, len(table))
        for count in ranks:
            if count > len(table):
                _say(f"batching {name}: {len(table)} utterances are too few for {count} ranks")
            else:
                comparison = BatchingComparison(name, table, limit, cuts, count)
                yield Case(what=f"batching {comparison}", measure=comparison.measurements)
    fewest = min(ranks)
    wanted = f"at most {most_ranks}, the number of utterances"
    expect(fewest <= most_ranks, "ranks", wanted, fewest)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _shipped_sets(quick: bool) -> Iterator[tuple[str, "Lengths"]]:
    from asrkit.data import shipped_lengths, web_like

    if quick:
        yield "web_like", web_like(4000)
        return
    yield "web_like", web_like(150_000)
    for name in ("librispeech_train_clean_100", "librispeech_eval", "ami_segments"):
        yield name, shipped_lengths(name)


def _check_set(table: "Lengths", limit: "Limit") -> None:
    expect(len(table) >= FEWEST, "lengths", f"at least {FEWEST} utterances", len(table))
    most = limit.share(1, table.seconds, table.tokens).max()
    wanted = "utterances that fit the limit of memory alone"
    expect(most <= 1, "lengths", wanted, f"{most:.2f} of it", "Cut long ones up.")


def _lhotse_cuts(table: "Lengths") -> Any:
    """lhotse cuts of these lengths; None where lhotse is not installed."""
    try:
        return samplers.cuts_of(table)
    except ImportError as error:
        _say(f"lhotse's samplers are left out, and the time that samplers take: {error}")
        return None


@dataclass(frozen=True)
class BatchingComparison:
    """All arms on one set of lengths, at one number of ranks."""

    name: str
    lengths: "Lengths"
    limit: "Limit"
    cuts: Any  # of lhotse, or None where it is not installed
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
        from asrkit.data import CANARY_COMPUTE

        params: dict[str, Any] = {
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
            timer = ""
            if metric.endswith("time"):
                timer = "time.perf_counter"
            yield Measurement(
                "batching",
                metric,
                UNITS.get(metric, "fraction"),
                median(values),
                tuple(values),
                impl=arm.name,
                timer=timer,
                params=params,
            )

    def _samples(self, arm: BatchingArm) -> dict[str, list[float]]:
        """A value of each metric for each epoch of an arm; of `met_again` one for each two."""
        from asrkit.data import CANARY_COMPUTE, padding_account

        epochs = [arm.epoch(number) for number in range(EPOCHS)]
        samples = {"kept": [self.check(arm, epoch) for epoch in epochs]}
        if not min(samples["kept"]):  # drop_last may leave nothing
            return samples
        accounts = []
        for epoch in epochs:
            pairs = [
                (self.lengths.seconds[rows], self.lengths.tokens[rows]) for rows in epoch.batches
            ]
            accounts.append(
                padding_account(pairs, cost=CANARY_COMPUTE, limit=self.limit, ranks=self.ranks)
            )
        for metric in ACCOUNTED:
            samples[metric] = [getattr(account, metric) for account in accounts]
        samples["met_again"] = [
            met_again(epoch, next_epoch) for epoch, next_epoch in itertools.pairwise(epochs)
        ]
        if arm.sampler:
            samples["sampler_time"], next_ms = samplers.pace(arm.sampler(), epochs)
            if next_ms:
                samples["next_time"] = next_ms[:NEXT_CALLS]
        return samples

    def check(self, arm: BatchingArm, epoch: Epoch) -> float:
        """The share of the utterances that an epoch holds.

        Args:
            arm: That the epoch is of.
            epoch: To check.

        Raises:
            AssertionError: A rank has no batch in a step, a batch exceeds the limit, or (unless
                the arm is another library's) utterances are lost or occur twice.
        """
        head = f"{self}: {arm.name}, of which nothing was recorded,"
        every_row = np.concatenate([np.empty(0), *epoch.batches])
        rows, counts = np.unique(every_row, return_counts=True)
        kept = len(rows) / len(self.lengths)
        repeated = int((counts - 1).sum())
        complete = all(len(step) == self.ranks and all(map(len, step)) for step in epoch.steps)
        assert complete, f"{head} has ranks without a batch."
        assert arm.theirs or kept == 1, f"{head} keeps {kept:.3%} of the utterances."
        allowed = 0
        if arm.theirs:  # lhotse repeats some where the last step would leave ranks without a batch
            allowed = self.ranks - 1
        assert repeated <= allowed, f"{head} has {repeated} utterances twice."
        largest = self.largest_share(epoch)
        assert largest <= 1, f"{head} has a batch of {largest:.3f} of the limit."
        return kept

    def largest_share(self, epoch: Epoch) -> float:
        """Share of the limit that the largest batch of an epoch uses."""
        D = self.lengths.seconds
        U = self.lengths.tokens
        shapes = np.array([(len(rows), D[rows].max(), U[rows].max()) for rows in epoch.drawn])
        return float(self.limit.share(*shapes.reshape(-1, 3).T).max(initial=0))

    def arms(self) -> Iterator[BatchingArm]:
        """The ways to batch that are compared, those of lhotse only where it is installed."""
        from asrkit import data

        lengths = self.lengths
        limit = self.limit
        work = data.CANARY_COMPUTE
        safe_size = int(limit.largest(lengths.seconds.max(), lengths.tokens.max()))
        random = data.Random(limit=data.at_most_utterances(safe_size))
        yield self.planned_arm("random_safe_size", random)
        yield self.with_largest_seconds(self._random_seconds)
        yield self.planned_arm("sorted", data.Sorted(limit=limit))
        if self.cuts is not None:
            yield from self.lhotse_arms()
        tables = {
            "bucketed_1d": data.buckets_1d(lengths, limit),
            "bucketed_2d": data.buckets_2d(lengths, limit),
        }
        for name, buckets in tables.items():
            bucketed = data.Bucketed(buckets=buckets, work=work)
            yield self.planned_arm(name, bucketed, cells=len(buckets))
        blurs = {"balanced": data.Balanced.blur, "balanced_sharp": (0.0, 0.0)}
        for name, blur in blurs.items():
            balanced = data.Balanced(limit=limit, work=work, blur=blur)
            yield self.planned_arm(name, balanced, blur=blur)

    def _random_seconds(self, seconds: float) -> BatchingArm:
        from asrkit import data

        return self.planned_arm("random_seconds", data.Random(limit=data.at_most_seconds(seconds)))

    def planned_arm(self, name: str, strategy: "Strategy", **params: Any) -> BatchingArm:
        """An arm of a strategy of asrkit.

        Args:
            name: Of the arm.
            strategy: That plans the epochs.
            params: To record beside its metrics.
        """
        from asrkit.data import plan

        def epoch(number: int) -> Epoch:
            steps = plan(strategy, self.lengths, ranks=self.ranks, epoch=number).steps
            return Epoch(steps, [rows for step in steps for rows in step])

        sampler = None
        if self.cuts is not None and name in TIMED:
            sampler = partial(samplers.ours, self.cuts, strategy, ranks=self.ranks)
        return BatchingArm(name, epoch, sampler, params)

    def lhotse_arms(self) -> Iterator[BatchingArm]:
        """Arms of lhotse: buckets limited by seconds, and fixed sizes of 2D buckets as in NeMo."""

        def limited(seconds: float) -> BatchingArm:
            return self._lhotse_arm("lhotse_1d", samplers.bucketing, max_duration=seconds)

        yield self.with_largest_seconds(limited)
        buckets = nemo_buckets(self.lengths, self.limit)
        for name, drop_last in (("nemo_like_2d", False), ("nemo_like_2d_drop_last", True)):
            yield self._lhotse_arm(name, samplers.nemo_like, buckets=buckets, drop_last=drop_last)

    def _lhotse_arm(self, name: str, make: Callable[..., Any], **options: Any) -> BatchingArm:
        """An arm of the sampler of lhotse that `make` makes."""
        import lhotse

        sampler = partial(make, self.cuts, ranks=self.ranks, **options)

        def epoch(number: int) -> Epoch:
            return samplers.every_rank(sampler(), number)

        timed = None
        if name in TIMED:
            timed = sampler
        return BatchingArm(name, epoch, timed, {"lhotse": lhotse.__version__}, theirs=True)

    def with_largest_seconds(self, limited: Callable[[float], BatchingArm]) -> BatchingArm:
        """The arm with the largest limit in seconds that keeps all its epochs within memory.

        Args:
            limited: Makes an arm with a limit in seconds. The largest is found to 2 %, and the
                arm returned has the epochs that it was found with.
        """
        order = list(range(EPOCHS))

        def fitting(seconds: float) -> BatchingArm | None:
            """The arm with this limit; None where a batch exceeds memory."""
            arm = limited(seconds)
            epochs: dict[int, Epoch] = {}
            for number in order:
                epochs[number] = arm.epoch(number)
                if self.largest_share(epochs[number]) > 1:
                    # Tried first from now on: it will soon show the next limit that is too large.
                    order.remove(number)
                    order.insert(0, number)
                    return None
            params = {**arm.params, "max_seconds": seconds}
            return arm._replace(epoch=epochs.__getitem__, params=params)

        best = None
        low = 0.0
        high = self.limit.most / self.limit.cost.per_second
        while best is None or high > 1.02 * low:
            middle = (low + high) / 2
            arm = fitting(middle)
            if arm is None:
                high = middle
            else:
                best = arm
                low = middle
        return best


def nemo_buckets(lengths: "Lengths", limit: "Limit") -> "Buckets":
    """2D buckets as NeMo estimates them: 30 bins of seconds with 5 cells of tokens each.

    Utterances with far more tokens per second than others of their bin are left out.

    Args:
        lengths: Of the utterances.
        limit: Sizes each bucket.
    """
    from asrkit.data import buckets_2d, duration_bins

    bins = np.searchsorted(duration_bins(lengths, 30), lengths.seconds)
    rates = lengths.tokens_per_second
    count = np.bincount(bins)
    mean = (np.bincount(bins, rates) / count)[bins]
    deviation = np.sqrt(np.bincount(bins, (rates - mean) ** 2) / count)[bins]
    usual = lengths.take(rates - mean <= OUTLIER * deviation)
    return buckets_2d(usual, limit, count=30, parts=5)


def met_again(epoch: Epoch, next_epoch: Epoch) -> float:
    """Of the pairs of utterances that share a batch, the share that does in the next epoch too."""
    next_batch_of_row = {}
    for number, rows in enumerate(next_epoch.batches):
        for row in rows.tolist():
            next_batch_of_row[row] = number
    pairs = 0
    again = 0
    for rows in epoch.batches:
        numbers = [next_batch_of_row[row] for row in rows.tolist() if row in next_batch_of_row]
        _, counts = np.unique(numbers, return_counts=True)
        pairs += len(rows) * (len(rows) - 1)
        again += int((counts * (counts - 1)).sum())
    return again / max(1, pairs)


SUITE = Suite(
    name="batching",
    cases=suite,
    cpu_only=True,
    options=("lengths", "ranks"),
)
