"""The suite of batching: samplers on the same lengths, under one limit of memory. What they pad,
and what a step of them costs.

All numbers but times follow from lengths, a model of memory and one of compute
(asrkit.data.batching.padding): no speech, no GPU. A limit in seconds is the largest that bisection
finds to keep every batch of the very epochs accounted for within memory. Who sets one beforehand
has to stay below it, so the arms that have one, random and lhotse's, are flattered.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asrkit.shapes import expect
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.rivals import samplers
from asrkit.workbench.bench.rivals.samplers import Epoch
from asrkit.workbench.records import Measurement

if TYPE_CHECKING:
    from asrkit.data import Buckets, Lengths, Limit
    from asrkit.data.batching.strategies import Strategy

RANKS = (1, 8, 64, 1024)
EPOCHS = 3
FEWEST = 100  # utterances of a table: lhotse wants one a bucket
ACCOUNTED = (
    "utilisation straggler memory memory_max audio_padding token_padding lattice_padding compute_padding batch_size steps"
).split()
ALWAYS = (
    "utilisation",
    "straggler",
    "kept",
    "sampler_time",
    "next_time",
)  # at any number of ranks; the rest at 8, or the first
UNITS = {"batch_size": "utterances", "steps": "steps", "sampler_time": "ms", "next_time": "ms"}
TIMED = (
    "lhotse_1d",
    "nemo_like_2d",
    "bucketed_2d",
    "balanced",
)  # the others go through the same doors
# deviations of tokens a second within a duration, from which on NeMo's estimate leaves an utterance
# out
OUTLIER = 4.0


class Arm(NamedTuple):
    """A way to batch: `epoch(number)` makes an epoch, `sampler()` what rank 0 iterates over."""

    name: str
    epoch: Callable[[int], Epoch]
    sampler: Callable[[], Any] | None
    told: Mapping[str, Any]
    theirs: bool = (
        False  # then what it loses and what its last step holds is recorded; ours would be refused
    )


def suite(
    device: str, quick: bool, *, lengths: Path | None = None, ranks: Sequence[int] = ()
) -> Iterator[Case]:
    """A comparison for each set of lengths, or for that in the file `lengths`, and each number of
    ranks; the same on any device.
    """
    ranks = ranks or (RANKS[:2] if quick else RANKS)
    expect(min(ranks) >= 1, "ranks", "1 or more", min(ranks))
    try:
        from asrkit.data import CANARY_MEMORY, Lengths, Limit
    except ImportError as error:
        _say(f"batching is left out: {error}")
        return
    limit, most_ranks = Limit(CANARY_MEMORY, 1.0), 0
    for name, table in (
        [(lengths.name.partition(".")[0], Lengths.read(lengths))] if lengths else _sets(quick)
    ):
        expect(len(table) >= FEWEST, "lengths", f"at least {FEWEST} utterances", len(table))
        most = limit.share(1, table.seconds, table.tokens).max()
        expect(
            most <= 1,
            "lengths",
            "utterances that fit the limit of memory alone",
            f"{most:.2f} of it",
            "Cut long ones up.",
        )
        # As a corpus comes: lhotse, which looks at 20,000 cuts at a time, would find one length in
        # a sorted table.
        table = table.take(np.random.default_rng(0).permutation(len(table)))
        try:
            cuts = samplers.cuts_of(table)
        except ImportError as error:
            cuts = None
            _say(f"lhotse's samplers are left out, and the time that samplers take: {error}")
        most_ranks = max(most_ranks, len(table))
        for count in ranks:
            if count > len(table):
                _say(f"batching {name}: {len(table)} utterances are too few for {count} ranks")
            else:
                wide = count == (8 if 8 in ranks else ranks[0])
                made = Comparison(name, table, limit, cuts, count, wide)
                yield Case(what=str(made), measure=made.measurements)
    expect(
        min(ranks) <= most_ranks,
        "ranks",
        f"at most {most_ranks}, the number of utterances",
        min(ranks),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _sets(quick: bool) -> Iterator[tuple[str, "Lengths"]]:
    from asrkit.data import shipped_lengths, web_like

    if quick:
        yield "web_like", web_like(4000)
        return
    yield "web_like", web_like(150_000)
    for name in ("librispeech_train_clean_100", "librispeech_eval", "ami_segments"):
        yield name, shipped_lengths(name)


@dataclass(frozen=True)
class Comparison:
    """All arms on one set of lengths, at one number of ranks."""

    name: str
    lengths: "Lengths"
    limit: "Limit"
    cuts: Any  # of lhotse, or None where that is not installed
    ranks: int
    wide: bool  # record all that there is to know

    def __str__(self) -> str:
        return f"batching {self.name}: {len(self.lengths):,} utterances, {self.lengths.hours:.1f} h, {self.ranks} ranks"

    def measurements(self) -> list[Measurement]:
        """Accounts of three epochs of each arm and the time of its sampler; AssertionError where an
        arm's batches are wrong.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", module="lhotse"
            )  # says that cuts are in memory, that a buffer may be small
            return [one for arm in self.arms() for one in self.measured(arm)]

    def measured(self, arm: Arm) -> Iterator[Measurement]:
        """What is recorded of one arm."""
        from asrkit.data import CANARY_COMPUTE, padding_account

        D, U, epochs = (
            self.lengths.seconds,
            self.lengths.tokens,
            [arm.epoch(number) for number in range(EPOCHS)],
        )
        found: dict[str, list[float]] = {"kept": [self.checked(arm, epoch) for epoch in epochs]}
        if min(found["kept"]):  # drop_last may leave nothing
            pairs = [[(D[rows], U[rows]) for rows in epoch.batches] for epoch in epochs]
            accounts = [
                padding_account(one, cost=CANARY_COMPUTE, limit=self.limit, ranks=self.ranks)
                for one in pairs
            ]
            found |= {
                metric: [getattr(account, metric) for account in accounts] for metric in ACCOUNTED
            }
            found["met_again"] = [
                met_again(one, other) for one, other in itertools.pairwise(epochs)
            ]
            if arm.sampler:
                found["sampler_time"], calls_ms = samplers.pace(arm.sampler(), epochs)
                found |= {"next_time": calls_ms[:50]} if calls_ms else {}
        middle = {metric: median(values) for metric, values in found.items()}
        params: dict[str, Any] = {
            "set": self.name,
            "ranks": self.ranks,
            "utterances": len(self.lengths),
            "hours": self.lengths.hours,
            "seed": 0,
            "epochs": EPOCHS,
            "limit": f"{self.limit.cost.formula} <= {self.limit.most:g}",
            "compute": CANARY_COMPUTE.formula,
            **arm.told,
        }
        for metric, values in found.items():
            if self.wide or metric in ALWAYS:
                told: dict[str, Any] = {
                    "impl": arm.name,
                    "timer": "time.perf_counter" if metric.endswith("time") else "",
                }
                told["params"] = params | ({"account": middle} if metric == "utilisation" else {})
                yield Measurement(
                    "batching",
                    metric,
                    UNITS.get(metric, "fraction"),
                    middle[metric],
                    tuple(values),
                    **told,
                )

    def checked(self, arm: Arm, epoch: Epoch) -> float:
        """The share of the utterances that an epoch holds; AssertionError where it is not as it
        should be.
        """
        head = f"{self}: {arm.name}, of which nothing was recorded,"
        rows, count = np.unique(np.concatenate([np.empty(0), *epoch.batches]), return_counts=True)
        kept, twice = len(rows) / len(self.lengths), int((count - 1).sum())
        assert all(len(step) == self.ranks and all(map(len, step)) for step in epoch.steps), (
            f"{head} has ranks without a batch."
        )
        assert arm.theirs or kept == 1, f"{head} keeps {kept:.3%} of the utterances."
        assert twice < (self.ranks if arm.theirs else 1), f"{head} has {twice} utterances twice."
        worst = self.worst(epoch)
        assert worst <= 1, f"{head} has a batch of {worst:.3f} of the limit."
        return kept

    def worst(self, epoch: Epoch) -> float:
        """What the largest batch uses of the limit."""
        D, U = self.lengths.seconds, self.lengths.tokens
        shapes = np.array([(len(rows), D[rows].max(), U[rows].max()) for rows in epoch.drawn])
        return float(self.limit.share(*shapes.reshape(-1, 3).T).max(initial=0))

    def arms(self) -> Iterator[Arm]:
        """The ways to batch that are compared: random, sorted, lhotse's where it is installed,
        ours.
        """
        from asrkit import data

        lengths, limit, work = self.lengths, self.limit, data.CANARY_COMPUTE

        def random(name: str, most: "Limit") -> Arm:
            return self.planned(name, data.Random(limit=most))

        safe = int(limit.largest(lengths.seconds.max(), lengths.tokens.max()))
        yield random("random_safe_size", data.at_most_utterances(safe))
        yield self.most_seconds(
            lambda seconds: random("random_seconds", data.at_most_seconds(seconds))
        )
        yield self.planned("sorted", data.Sorted(limit=limit))
        yield from self.of_lhotse() if self.cuts is not None else ()
        for name, buckets in (
            ("bucketed_1d", data.buckets_1d(lengths, limit)),
            ("bucketed_2d", data.buckets_2d(lengths, limit)),
        ):
            yield self.planned(name, data.Bucketed(buckets=buckets, work=work), cells=len(buckets))
        for name, blur in (("balanced", data.Balanced.blur), ("balanced_sharp", (0.0, 0.0))):
            yield self.planned(name, data.Balanced(limit=limit, work=work, blur=blur), blur=blur)

    def planned(self, name: str, strategy: "Strategy", **told: Any) -> Arm:
        """An arm of ours."""
        from asrkit.data import plan

        def epoch(number: int) -> Epoch:
            steps = plan(strategy, self.lengths, ranks=self.ranks, epoch=number).steps
            return Epoch(steps, [rows for step in steps for rows in step])

        timed = self.cuts is not None and name in TIMED
        return Arm(
            name,
            epoch,
            partial(samplers.ours, self.cuts, strategy, ranks=self.ranks) if timed else None,
            told,
        )

    def of_lhotse(self) -> Iterator[Arm]:
        """lhotse's dynamic buckets limited by seconds, and with fixed sizes of 2D buckets as NeMo
        has them.
        """
        import lhotse

        def arm(name: str, make: Callable[..., Any], **how: Any) -> Arm:
            def made() -> Any:
                return make(self.cuts, ranks=self.ranks, **how)

            timed = made if name in TIMED else None
            return Arm(
                name,
                lambda number: samplers.every_rank(made(), number),
                timed,
                {"lhotse": lhotse.__version__},
                theirs=True,
            )

        yield self.most_seconds(
            lambda seconds: arm("lhotse_1d", samplers.bucketing, max_duration=seconds)
        )
        buckets = nemo_buckets(self.lengths, self.limit)
        for name, drop_last in (("nemo_like_2d", False), ("nemo_like_2d_drop_last", True)):
            yield arm(name, samplers.nemo_like, buckets=buckets, drop_last=drop_last)

    def most_seconds(self, limited: Callable[[float], Arm]) -> Arm:
        """The arm with the largest limit in seconds, to 2 %, that keeps all batches of its epochs
        within memory; it has these.
        """
        order = list(range(EPOCHS))

        def tried(seconds: float) -> Arm | None:
            arm, epochs = limited(seconds), dict[int, Epoch]()
            for number in order:
                epochs[number] = arm.epoch(number)
                if self.worst(epochs[number]) > 1:
                    order.sort(
                        key=lambda other: other != number
                    )  # the next that is too large will fail at once
                    return None
            return arm._replace(epoch=epochs.__getitem__, told={**arm.told, "max_seconds": seconds})

        best, low, high = None, 0.0, self.limit.most / self.limit.cost.per_second
        while best is None or high > 1.02 * low:
            middle = (low + high) / 2
            found = tried(middle)
            best, low, high = (found, middle, high) if found else (best, low, middle)
        return best


def nemo_buckets(lengths: "Lengths", limit: "Limit") -> "Buckets":
    """30 bins with the same seconds in each, cut into 5 cells with the same tokens in each, as if
    there were no outliers.
    """
    from asrkit.data import buckets_2d, duration_bins

    bins = np.searchsorted(duration_bins(lengths, 30), lengths.seconds)
    rates = lengths.tokens_per_second
    count = np.bincount(bins)
    mean = (np.bincount(bins, rates) / count)[bins]
    deviation = np.sqrt(np.bincount(bins, (rates - mean) ** 2) / count)[bins]
    return buckets_2d(lengths.take(rates - mean <= OUTLIER * deviation), limit, count=30, parts=5)


def met_again(one: Epoch, other: Epoch) -> float:
    """Of the pairs that share a batch in `one`, the share that shares one in `other` too."""
    there = {row: number for number, rows in enumerate(other.batches) for row in rows.tolist()}
    pairs = again = 0
    for rows in one.batches:
        _, counts = np.unique(
            [there[row] for row in rows.tolist() if row in there], return_counts=True
        )
        pairs, again = (
            pairs + len(rows) * (len(rows) - 1),
            again + int((counts * (counts - 1)).sum()),
        )
    return again / max(1, pairs)


COLUMNS = {
    "sampler": "{impl}",
    "B": "{batch_size:.1f}",
    "steps": "{steps:.0f}",
    "audio": "{audio_padding:.1%}",
    "tokens": "{token_padding:.1%}",
    "lattice": "{lattice_padding:.1%}",
    "memory": "{memory:.2f}",
    "most": "{memory_max:.2f}",
    "waits": "{straggler:.1%}",
    "utilisation": "{utilisation:.1%}",
    "kept": "{kept:.2%}",
    "met again": "{met_again:.2%}",
    "ms a step": "{sampler_time:.1f}",
    "a next": "{next_time:.2f}",
}


def _cell(form: str, arm: Mapping[str, Any]) -> str:
    try:
        return form.format_map(arm)
    except KeyError:  # not every sampler is timed
        return ""


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Aligned lines, one an arm, under a heading for each set and number of ranks."""
    arms = dict[tuple[Any, ...], dict[str, Any]]()
    for record in records:
        params = record["params"]
        arm = arms.setdefault(
            (params["set"], params["ranks"], record["impl"]), {"impl": record["impl"], **params}
        )
        arm |= params.get("account", {record["metric"]: record["value"]})
    lines = list[str]()
    for heading in dict.fromkeys(key[:2] for key in arms):
        rows = [arm for key, arm in arms.items() if key[:2] == heading]
        cells = [[*COLUMNS], *([_cell(form, arm) for form in COLUMNS.values()] for arm in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        one = rows[0]
        lines += [
            "",
            "{set}, {utterances:,} utterances, {hours:.1f} h, ranks: {ranks}".format_map(one),
        ]
        lines += [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in cells
        ]
    return [*lines[1:], LEGEND] if lines else []


LEGEND = (
    "B: utterances a batch. audio, tokens, lattice: share of padding in seconds, tokens and their products. memory: mean share of "
    "the limit that a batch uses, and the most. waits: share of the ranks' time spent waiting for the slowest of their step. "
    "utilisation: useful compute over what the ranks could have done in that time. kept: of the utterances. met again: of the "
    "pairs that share a batch, those that do in the next epoch too. ms a step: of the sampler on one rank, over an epoch with "
    "what comes before its first step; a next: the median of the fifty calls after that. Batches of any size are as efficient "
    "here; where an epoch has few steps, an incomplete last one weighs much."
)

SUITE = Suite(name="batching", cases=suite, tables={"batching": table})
