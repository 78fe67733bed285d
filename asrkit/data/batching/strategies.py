"""Plans of an epoch: which utterances share a batch, and which batches share a step.

A plan is computed from lengths alone, before any audio is read. It is a function of (strategy,
lengths, ranks, seed, epoch). So every rank computes the same plan and keeps its own part, any step
can be resumed without earlier ones, and the cost of a step does not depend on the number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from asrkit.data.batching.buckets import Buckets
from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import CANARY_COMPUTE, Cost
from asrkit.shapes import expect, expect_choice, whole

Batches = list[np.ndarray]  # row numbers of each batch


class Constraint(Protocol):
    """A limit for batches: asrkit.data.Limit, or any object with this method."""

    def share(self, n: Any, D: Any, U: Any) -> Any:
        """Share of the limit that batches use, elementwise; batches above 1 do not fit.

        Args:
            n: Number of utterances in each batch.
            D: Seconds that they are padded to.
            U: Tokens that they are padded to.
        """
        ...


class Strategy(Protocol):
    """A strategy of batching: Random, Sorted, Bucketed, Balanced or your own.

    With a method `deal(step, lengths)`, like Presorted, it also redistributes the utterances of a
    step over the ranks.
    """

    @property
    def balance_by(self) -> Cost | None:
        """Cost by which batches of a step are matched across ranks; steps are then shuffled.

        None keeps the order of the batches.
        """
        ...

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """Divide the utterances of an epoch into batches.

        Args:
            lengths: Lengths of all N utterances.
            ranks: Number of ranks that the batches are for.
            random: The only source of randomness.

        Returns:
            The row numbers of each batch, and the rows that are in none of them.
        """
        ...


@dataclass(frozen=True)
class Plan:
    """An epoch.

    Attributes:
        steps: steps[k][rank] are the row numbers of one batch.
        dropped: Row numbers that are in no batch.
    """

    steps: list[Batches]
    dropped: np.ndarray

    def pairs(self, lengths: Lengths) -> list[tuple[np.ndarray, np.ndarray]]:
        """(seconds, tokens) of each batch, as `padding_account` takes them."""
        return [
            (lengths.seconds[rows], lengths.tokens[rows]) for step in self.steps for rows in step
        ]


def plan(
    strategy: Strategy,
    lengths: Lengths,
    *,
    ranks: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Plan an epoch. Every rank gets a batch in every step.

    The largest batches are halved until every rank has one in the last step too. If none can be
    halved, as many batches of one utterance as are left over, chosen at random, are dropped.

    Args:
        strategy: Random, Sorted, Bucketed, Balanced, Presorted or your own.
        lengths: Lengths of at least as many utterances as there are ranks.
        ranks: Number of ranks that train together.
        seed: Seed of the random numbers, together with `epoch`.
        epoch: Number of the epoch, from 0.

    Raises:
        ValueError: An invalid argument.
    """
    expect(
        hasattr(strategy, "batches") and hasattr(strategy, "balance_by"),
        "strategy",
        "Random, Sorted, Bucketed, Balanced, Presorted or your own",
        repr(strategy),
    )
    expect(whole(ranks, 1), "ranks", "a whole number of at least 1", repr(ranks))
    counters = (seed, epoch)
    expect(whole(seed, 0) and whole(epoch, 0), "seed, epoch", "whole numbers from 0 up", counters)
    enough = len(lengths) >= ranks
    expect(enough, "lengths", f"an utterance for each of {ranks} ranks", len(lengths))
    random = np.random.default_rng([seed, epoch])
    batches, dropped = strategy.batches(lengths, ranks, random)
    batches, left_over = _complete_last_step(batches, ranks, random)
    if strategy.balance_by:
        batches = _balance_steps(batches, lengths, ranks, strategy.balance_by, random)
    steps = [batches[first : first + ranks] for first in range(0, len(batches), ranks)]
    deal = getattr(strategy, "deal", None)
    if deal is not None:
        steps = [deal(step, lengths) for step in steps]
    return Plan(steps, np.concatenate([dropped, *left_over]))


def _complete_last_step(
    batches: Batches, ranks: int, random: np.random.Generator
) -> tuple[Batches, Batches]:
    """Halve the largest batches until their number is a multiple of `ranks`.

    The parts of a batch stay neighbours. If all batches have one utterance, some are left over;
    they are returned separately.
    """
    batches = [*batches]
    sizes = np.array([len(rows) for rows in batches])
    for _ in range(-len(batches) % ranks):
        largest = int(sizes.argmax())
        rows = batches[largest]
        if len(rows) == 1:
            chosen = set(random.choice(len(batches), len(batches) % ranks, replace=False))
            left_over = [batches.pop(number) for number in sorted(chosen, reverse=True)]
            return batches, left_over
        batches[largest : largest + 1] = [rows[::2], rows[1::2]]
        sizes[largest] = len(batches[largest])
        sizes = np.insert(sizes, largest + 1, len(batches[largest + 1]))
    return batches, []


def cut(rows: np.ndarray, lengths: Lengths, limit: Constraint, *, most: float = 1.0) -> Batches:
    """Cut a sequence of utterances into batches, each as large as the limit allows.

    Args:
        rows: Row numbers, in the order in which they are batched.
        lengths: Lengths of all utterances.
        limit: Limit for each batch. An utterance that exceeds it alone is a batch by itself.
        most: Largest share of the limit that a batch may use.

    Returns:
        Consecutive parts of `rows`.
    """
    seconds = lengths.seconds[rows]
    tokens = lengths.tokens[rows]
    batches = []
    first = 0
    window = 64  # number of rows in which the end of a batch is searched
    while first < len(rows):
        D = np.maximum.accumulate(seconds[first : first + window])
        U = np.maximum.accumulate(tokens[first : first + window])
        too_large = limit.share(np.arange(1, len(D) + 1), D, U) > most
        size = int(too_large.argmax())  # 0 where none is too large
        if not too_large[size]:
            if first + window < len(rows):
                window *= 2
                continue
            size = len(D)
        size = max(1, size)
        batches.append(rows[first : first + size])
        first += size
        window = max(16, 2 * size)
    return batches


def _balance_steps(
    batches: Batches, lengths: Lengths, ranks: int, cost: Cost, random: np.random.Generator
) -> Batches:
    """Put batches of similar cost into one step, and the steps into random order."""
    n = np.array([len(rows) for rows in batches], dtype=np.float64)
    D = np.array([lengths.seconds[rows].max() for rows in batches], dtype=np.float64)
    U = np.array([lengths.tokens[rows].max() for rows in batches], dtype=np.float64)
    order = np.argsort(-cost(n, D, U), kind="stable")
    steps = random.permutation(order.reshape(-1, ranks))
    return [batches[number] for number in steps.ravel()]


def _no_rows() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class _Limited:
    """A strategy whose batches have a limit."""

    limit: Constraint

    def __post_init__(self) -> None:
        has_share = hasattr(self.limit, "share")
        remedy = "Pass limit=at_most_seconds(600), for example."
        expect(has_share, "limit", "asrkit.data.Limit or your own", repr(self.limit), remedy)


@dataclass(frozen=True, kw_only=True)
class Random(_Limited):
    """Shuffled utterances, cut into batches."""

    balance_by = None

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy.batches for `lengths`, `ranks` and `random`."""
        order = random.permutation(len(lengths))
        return cut(order, lengths, self.limit), _no_rows()


@dataclass(frozen=True, kw_only=True)
class Sorted(_Limited):
    """Longest utterances first, in the same order in every epoch: for evaluation.

    For training, lengths in descending order are rarely wanted.
    """

    balance_by = None

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy.batches for `lengths`, `ranks` and `random`."""
        order = np.argsort(-lengths.seconds, kind="stable")
        return cut(order, lengths, self.limit), _no_rows()


@dataclass(frozen=True, kw_only=True)
class Bucketed:
    """Batches of one bucket each, of the bucket's size, in random order.

    Attributes:
        buckets: The table, such as from buckets_1d or buckets_2d.
        tails: Treatment of utterances that do not fill a batch: `carry` them into the next larger
            bucket, `keep` them as a small batch, or `drop` them.
        synchronized: Whether the ranks of a step get batches of similar cost, such as those of
            neighbouring buckets. Otherwise the most expensive of unrelated batches delays a step.
        work: Cost by which `synchronized` compares batches.
    """

    buckets: Buckets
    tails: Literal["carry", "keep", "drop"] = "carry"
    synchronized: bool = True
    work: Cost = CANARY_COMPUTE

    def __post_init__(self) -> None:
        is_table = isinstance(self.buckets, Buckets)
        expect(is_table, "buckets", "asrkit.data.Buckets", repr(self.buckets))
        expect_choice("tails", self.tails, ("carry", "keep", "drop"))

    @property
    def balance_by(self) -> Cost | None:
        """`work` where synchronized, else None."""
        return self.work if self.synchronized else None

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy.batches for `lengths`, `ranks` and `random`."""
        bucket_of_row = self.buckets.cell(lengths)
        too_large = int((bucket_of_row < 0).sum())
        remedy = "Estimate the buckets on these lengths."
        wanted = "room for every utterance"
        expect(too_large == 0, "buckets", wanted, f"{too_large} that are too large", remedy)
        waiting = [np.flatnonzero(bucket_of_row == k) for k in range(len(self.buckets))]
        batches: Batches = []
        dropped = [_no_rows()]
        for k, size in enumerate(self.buckets.sizes.tolist()):
            rows = random.permutation(waiting[k])
            end = len(rows) // size * size
            batches += [rows[first : first + size] for first in range(0, end, size)]
            tail = rows[end:]
            if self.tails == "carry":
                tail = self._carry(tail, lengths, waiting, above=k)
            if not len(tail):
                continue
            if self.tails == "drop":
                dropped.append(tail)
            else:
                batches.append(tail)
        order = random.permutation(len(batches))
        return [batches[number] for number in order], np.concatenate(dropped)

    def _carry(
        self, tail: np.ndarray, lengths: Lengths, waiting: Batches, *, above: int
    ) -> np.ndarray:
        """Move a tail to buckets after `above` that fit; return the rows that fit into none."""
        larger = self.buckets.cell(lengths.take(tail), above=above)
        for k in np.unique(larger[larger >= 0]):
            waiting[k] = np.concatenate([waiting[k], tail[larger == k]])
        return tail[larger < 0]


@dataclass(frozen=True, kw_only=True)
class Balanced(_Limited):
    """asrkit's own strategy, without fixed buckets. Nothing is dropped and few batches are small.

    The utterances are sorted by seconds and cut into slabs. Each slab is sorted by tokens and cut
    into batches that fill the limit; the rest of a slab begins the next one. The number of batches
    is a multiple of the ranks, and the ranks of a step get batches of similar cost. Slabs and
    batches begin at different places in each epoch, and lengths are blurred for sorting. More blur
    lets an utterance share batches with more different ones over the epochs, at more padding.

    Attributes:
        limit: Limit for each batch.
        work: Cost that padding should waste least of, and by which ranks are balanced. If tokens
            cost nothing, slabs are in random order instead of sorted by tokens.
        blur: Largest random change of seconds and of tokens, as shares below 1.
    """

    work: Cost = CANARY_COMPUTE
    blur: tuple[float, float] = (0.005, 0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = all(0 <= share < 1 for share in self.blur)
        expect(shares, "blur", "two shares below 1", self.blur)

    @property
    def balance_by(self) -> Cost:
        """`work`."""
        return self.work

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy.batches for `lengths`, `ranks` and `random`."""
        noise = random.uniform(-1, 1, (2, len(lengths)))
        phase = random.random()
        second_blur, token_blur = self.blur
        blurred_seconds = lengths.seconds * (1 + second_blur * noise[0])
        order = np.argsort(-blurred_seconds, kind="stable")
        _, token_cost = self.work.slopes(1.0, 1.0)
        if token_cost:
            # the small summand puts utterances of equal length in random order
            ranking = lengths.tokens * (1 + token_blur * noise[1]) + 1e-6 * noise[1]
        else:
            ranking = noise[1]

        def fill(most: float) -> Batches:
            return self._fill(order, lengths, ranking, phase, most)

        return _fill_last_step(fill, ranks), _no_rows()

    def _fill(
        self,
        order: np.ndarray,
        lengths: Lengths,
        ranking: np.ndarray,
        phase: float,
        most: float,
    ) -> Batches:
        """Batches that use at most the share `most` of the limit.

        `order` lists the rows by blurred seconds, `ranking` has the blurred tokens of each row, and
        `phase` is the place in its slot at which a slab begins, 0 to 1.
        """
        batches: Batches = []
        rest = order[:0]
        slabs = np.split(order, self._slab_starts(order, lengths, ranking, phase, most))
        for number, slab in enumerate(slabs):
            # slabs are sorted in alternating directions, so that the rest meets similar utterances
            sign = -1 if number % 2 == 0 else 1
            by_tokens = slab[np.argsort(sign * ranking[slab], kind="stable")]
            rows = np.concatenate([rest, by_tokens])
            pieces = cut(rows, lengths, self.limit, most=most)
            if pieces:
                rest = pieces.pop()
            batches += pieces
        return [*batches, rest]

    def _slab_starts(
        self,
        order: np.ndarray,
        lengths: Lengths,
        ranking: np.ndarray,
        phase: float,
        most: float,
    ) -> np.ndarray:
        """Positions in `order` at which slabs begin, without the first.

        If the lengths span w seconds and R tokens and fill m batches, s slabs of m / s batches pad
        a w / 2s + b R s / 2m an utterance, where a and b are the costs of a second and a token.
        The minimum is at s² = m a w / (b R). The plan takes seven tenths of that, so that
        utterances meet more others, which costs about 1 % of utilisation (measured).

        The formula is applied to 64 parts of `order` separately, since rates and limits differ
        between short and long utterances; `slabs_before` accumulates the results.
        """
        parts = [part for part in np.array_split(order, 64) if len(part)]
        slabs_before = [0.0]
        for rows in parts:
            slabs = 0.7 * self._best_slabs(rows, lengths, ranking, most)
            slabs_before.append(slabs_before[-1] + slabs)
        count = max(1, round(min(slabs_before[-1], len(order))))
        starts = (np.arange(1, count) + phase - 0.5) / count * slabs_before[-1]
        rows_before = np.cumsum([0, *map(len, parts)])
        return np.interp(starts, slabs_before, rows_before).astype(np.int64)

    def _best_slabs(
        self, rows: np.ndarray, lengths: Lengths, ranking: np.ndarray, most: float
    ) -> float:
        """Number of slabs, not rounded, that minimises the padding of `rows`."""
        seconds = lengths.seconds[rows]
        tokens = lengths.tokens[rows]
        ranked = np.sort(ranking[rows])
        # the difference of two utterances and one excludes the fixed cost of a batch
        one = self.limit.share(1, seconds, tokens)
        two = self.limit.share(2, seconds, tokens)
        full_batches = float(np.sum(two - one)) / most
        second_cost, token_cost = self.work.slopes(float(seconds.mean()), float(ranked.mean()))
        if not tokens.any():
            token_cost = 0.0
        outliers = len(ranked) // 32  # ignored at either end
        lowest = ranked[outliers]
        highest = ranked[-1 - outliers]
        token_span = max(float(highest - lowest), 1e-12)
        second_span = float(np.ptp(seconds))
        token_padding = max(token_cost * token_span, 1e-12)
        second_padding = second_cost * second_span
        best = (second_padding * full_batches / token_padding) ** 0.5
        return min(full_batches, best)


def _fill_last_step(fill: Callable[[float], Batches], ranks: int) -> Batches:
    """Search for a share of the limit at which the batches fill the last step of all ranks.

    `fill(most)` returns batches that use at most the share `most`. With the full limit some ranks
    have no batch in the last step; a little less gives a few more batches. Of up to eight trials,
    the one with most batches is returned that does not need a further step.
    """
    batches = fill(1.0)
    best = batches
    target = -(-len(batches) // ranks) * ranks
    low = 0.0
    high = 1.0
    most = 1.0
    for _ in range(8):
        if len(best) >= 0.99 * target:
            break
        if len(batches) > target:
            low = most
        else:
            high = most
        # proportional to the batches, but well inside of the remaining interval
        proportional = most * len(batches) / target
        least = 0.9 * low + 0.1 * high
        greatest = 0.1 * low + 0.9 * high
        most = min(max(proportional, least), greatest)
        batches = fill(most)
        if len(best) < len(batches) <= target:
            best = batches
    return best
