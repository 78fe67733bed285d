"""Which utterances share a batch, and which batches a step: an epoch planned from lengths alone,
before any audio is read.

A plan is a function of (strategy, lengths, ranks, seed, epoch). So each rank makes the same one and
keeps its own part of it, any step can be resumed without the steps before it, and what a step costs
does not depend on the number of ranks.
"""

import heapq
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from asrkit.data.batching.buckets import Buckets
from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import CANARY_COMPUTE, Cost
from asrkit.shapes import expect, whole

Batches = list[np.ndarray]  # rows of each batch


class Constraint(Protocol):
    """What a batch may hold; asrkit.data.Limit is one, and any object with this method will do."""

    def share(self, n: Any, D: Any, U: Any) -> Any:
        """What n utterances padded to D seconds and U tokens use of the limit, elementwise; above 1
        they do not fit.
        """
        ...


class Strategy(Protocol):
    """A way to batch: Random, Sorted, Bucketed, Balanced or one's own."""

    @property
    def alike(self) -> Cost | None:
        """What the batches of a step should have alike, their steps in random order; None: batches
        stay in their order.
        """
        ...

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """Batches, and the rows that are in none of them."""
        ...


@dataclass(frozen=True)
class Plan:
    """An epoch: steps[k][rank] are the rows of one batch. `dropped` are the rows in none of them."""

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
    drop_last: bool = False,
) -> Plan:
    """The epoch of a strategy. Every rank gets a batch in every step: for the last one, the largest
    batches are halved.

    drop_last: leave the batches of an incomplete last step out instead, into `dropped`.
    """
    expect(
        hasattr(strategy, "batches"),
        "strategy",
        "Random, Sorted, Bucketed, Balanced or one's own",
        repr(strategy),
    )
    expect(whole(ranks, 1), "ranks", "a whole number of at least 1", repr(ranks))
    expect(
        whole(seed, 0) and whole(epoch, 0), "seed, epoch", "whole numbers from 0 up", (seed, epoch)
    )
    expect(
        len(lengths) >= ranks, "lengths", f"an utterance for each of {ranks} ranks", len(lengths)
    )
    random = np.random.default_rng([seed, epoch])
    batches, dropped = strategy.batches(lengths, ranks, random)
    if not drop_last:
        batches = _completed(batches, ranks)
    if strategy.alike:
        batches = _side_by_side(batches, lengths, ranks, strategy.alike, random)
    end = len(batches) // ranks * ranks
    steps = [batches[first : first + ranks] for first in range(0, end, ranks)]
    return Plan(steps, np.concatenate([dropped, *batches[end:]]))


def _completed(batches: Batches, ranks: int) -> Batches:
    """`batches`, the largest of them halved until their number is a multiple of `ranks`; halves
    stay neighbours.
    """
    parts = [[rows] for rows in batches]
    heap = [(-len(rows), number, 0) for number, rows in enumerate(batches)]
    heapq.heapify(heap)
    for _ in range(-len(batches) % ranks):
        size, number, place = heapq.heappop(heap)
        got = f"{sum(map(len, batches))} utterances in {len(batches)} batches"
        expect(
            size < -1,
            "strategy",
            f"batches to halve for {ranks} ranks",
            got,
            "Pass drop_last=True, or allow larger batches.",
        )
        rows = parts[number][place]
        parts[number][place] = rows[::2]
        parts[number].append(rows[1::2])
        for half in (place, len(parts[number]) - 1):
            heapq.heappush(heap, (-len(parts[number][half]), number, half))
    return [rows for group in parts for rows in group]


def cut(rows: np.ndarray, lengths: Lengths, limit: Constraint, *, most: float = 1.0) -> Batches:
    """`rows`, in their order, in batches that use at most the share `most` of the limit, each as
    long as can be.

    An utterance that does not fit is a batch of its own.
    """
    seconds, tokens = lengths.seconds[rows], lengths.tokens[rows]
    batches, first, window = [], 0, 64
    while first < len(rows):
        D, U = (np.maximum.accumulate(part[first : first + window]) for part in (seconds, tokens))
        over = limit.share(np.arange(1, len(D) + 1), D, U) > most
        size = int(over.argmax())  # that fit, unless all do
        if not over[size] and first + window < len(rows):
            window *= 2
            continue
        size = max(1, size if over[size] else len(D))
        batches.append(rows[first : first + size])
        first, window = first + size, max(16, 2 * size)
    return batches


def _side_by_side(
    batches: Batches, lengths: Lengths, ranks: int, work: Cost, random: np.random.Generator
) -> Batches:
    """Batches of like work side by side in a step, and the steps in random order; an incomplete one
    is the last.
    """
    shapes = [
        (len(rows), lengths.seconds[rows].max(), lengths.tokens[rows].max()) for rows in batches
    ]
    order = np.argsort(-work(*np.array(shapes).reshape(-1, 3).T), kind="stable")
    whole = len(order) // ranks * ranks
    steps = order[:whole].reshape(-1, ranks)
    return [batches[number] for number in [*random.permutation(steps).ravel(), *order[whole:]]]


@dataclass(frozen=True, kw_only=True)
class Random:
    """Shuffled, nothing else."""

    limit: Constraint
    alike = None

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy."""
        return cut(random.permutation(len(lengths)), lengths, self.limit), np.empty(
            0, dtype=np.int64
        )


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """Longest first, the same in every epoch: for evaluation. Training on it sees lengths in order,
    and most do not want that.
    """

    limit: Constraint
    alike = None

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy."""
        return cut(np.argsort(-lengths.seconds, kind="stable"), lengths, self.limit), np.empty(
            0, dtype=np.int64
        )


@dataclass(frozen=True, kw_only=True)
class Bucketed:
    """Batches of one bucket each, of its size; 1D or 2D is up to the buckets.

    tails, what does not fill a batch: carry it into the next larger bucket; keep it as a small
    batch; drop it. synchronized: the batches of a step have like work, as batches of neighbouring
    buckets do; where not, a step lasts as long as the worst of any. In either case the order is
    random. misfits, utterances larger than every bucket: an error, or drop them.
    """

    buckets: Buckets
    tails: Literal["carry", "keep", "drop"] = "carry"
    synchronized: bool = True
    misfits: Literal["error", "drop"] = "error"
    work: Cost = CANARY_COMPUTE

    def __post_init__(self) -> None:
        expect(
            self.tails in ("carry", "keep", "drop"),
            "tails",
            "carry, keep or drop",
            repr(self.tails),
        )
        expect(self.misfits in ("error", "drop"), "misfits", "error or drop", repr(self.misfits))

    @property
    def alike(self) -> Cost | None:
        """`work` where synchronized."""
        return self.work if self.synchronized else None

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy."""
        cells = self.buckets.cell(lengths)
        (dropped,) = np.nonzero(cells < 0)
        remedy = "Estimate the buckets on these lengths, or pass misfits='drop'."
        expect(
            self.misfits == "drop" or not len(dropped),
            "buckets",
            "room for every utterance",
            f"{len(dropped)} misfits",
            remedy,
        )
        waiting = [np.flatnonzero(cells == number) for number in range(len(self.buckets))]
        batches, left = [], [dropped]
        for number, size in enumerate(self.buckets.sizes.tolist()):
            rows = random.permutation(waiting[number])
            batches += [
                rows[first : first + size] for first in range(0, len(rows) - size + 1, size)
            ]
            tail = rows[len(rows) // size * size :]
            onward = (
                self.buckets.cell(lengths.take(tail), above=number)
                if self.tails == "carry"
                else np.full(len(tail), -1)
            )
            for there in np.unique(onward[onward >= 0]):
                waiting[there] = np.concatenate([waiting[there], tail[onward == there]])
            if len(rest := tail[onward < 0]):
                (left if self.tails == "drop" else batches).append(rest)
        return [batches[number] for number in random.permutation(len(batches))], np.concatenate(
            left
        )


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """Ours: no fixed buckets. The whole set is cut into slabs of like seconds, each slab into
    batches of like tokens.

    Each batch is filled to the limit; what a slab leaves over begins the next, so nothing is
    dropped and few batches are small. The ranks of a step get like work, and their number divides
    that of the batches. Neither slabs nor batches begin where they did the epoch before, and
    lengths are blurred by the shares `blur` (seconds, tokens) while likes are sought: the larger
    these, the more an utterance meets others, and the more is padded.
    """

    limit: Constraint
    work: Cost = CANARY_COMPUTE  # what padding should waste least of
    blur: tuple[float, float] = (0.005, 0.05)

    def __post_init__(self) -> None:
        expect(
            len(self.blur) == 2 and all(0 <= share < 1 for share in self.blur),
            "blur",
            "two shares below 1",
            self.blur,
        )

    @property
    def alike(self) -> Cost:
        """`work`."""
        return self.work

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy."""
        noise, phase = random.uniform(-1, 1, (2, len(lengths))), random.random()
        blurred = Lengths(lengths.seconds * (1 + self.blur[0] * noise[0]), lengths.tokens)
        ranking = (
            lengths.tokens * (1 + self.blur[1] * noise[1]) + 1e-6 * noise[1]
        )  # likes are in random order
        low, high, most = 0.0, 1.0, 1.0
        best = batches = self._filled(lengths, blurred, ranking, phase, 1.0)
        aim = -(-len(batches) // ranks) * ranks
        for _ in range(
            8
            # a little less than the limit allows, so that in the last step too every rank has a batch
        ):
            if len(best) >= 0.99 * aim:
                break
            low, high = (most, high) if len(batches) > aim else (low, most)
            most = min(
                max(most * len(batches) / aim, 0.9 * low + 0.1 * high), 0.1 * low + 0.9 * high
            )
            batches = self._filled(lengths, blurred, ranking, phase, most)
            best = batches if len(best) < len(batches) <= aim else best
        return best, np.empty(0, dtype=np.int64)

    def _filled(
        self, lengths: Lengths, blurred: Lengths, ranking: np.ndarray, phase: float, most: float
    ) -> Batches:
        order = np.argsort(-blurred.seconds, kind="stable")
        batches, left, sign = Batches(), order[:0], -1
        for rows in np.split(order, self._slabs(order, lengths, ranking, phase, most)):
            rows = rows[np.argsort(sign * ranking[rows], kind="stable")]
            *full, left = cut(np.concatenate([left, rows]), lengths, self.limit, most=most) or [
                left
            ]
            batches, sign = batches + full, -sign  # to and fro, so that what is left meets its like
        return [*batches, left]

    def _slabs(
        self, order: np.ndarray, lengths: Lengths, ranking: np.ndarray, phase: float, most: float
    ) -> np.ndarray:
        """Where in `order` slabs begin.

        Where the lengths span w seconds and R tokens and fill m batches, s slabs of m / s batches
        pad a w / 2s + b R s / 2m an utterance, a and b being what a second and a token cost. That
        is least at s² = m a w / (b R). Seven tenths as many are made, so that utterances meet more
        others, which costs about 1 % of utilisation (measured).
        """
        parts, slabs = [part for part in np.array_split(order, 64) if len(part)], [0.0]
        for rows in parts:
            seconds, tokens = lengths.seconds[rows], np.sort(ranking[rows])
            one, two = (self.limit.share(n, seconds, lengths.tokens[rows]) for n in (1, 2))
            full = float(np.sum(two - one)) / most  # what a batch costs for itself left out
            a, b = self.work.slopes(float(seconds.mean()), float(tokens.mean()))
            R = float(tokens[-1 - len(tokens) // 32] - tokens[len(tokens) // 32])
            b, R = b * bool(lengths.tokens[rows].any()), max(R, 1e-12)
            slabs.append(
                slabs[-1]
                + 0.7 * min(full, (a * float(np.ptp(seconds)) * full / max(b * R, 1e-12)) ** 0.5)
            )
        count = max(1, round(min(slabs[-1], len(order))))
        starts = (np.arange(1, count) + phase - 0.5) / count * slabs[-1]
        return np.interp(starts, slabs, np.cumsum([0, *map(len, parts)])).astype(np.int64)
