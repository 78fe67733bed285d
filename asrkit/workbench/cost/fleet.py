"""How long a bulk transcription takes on many workers: its shards simulated, one by one.

A worker is a process with a GPU or a core of its own. It starts, then transcribes shard after
shard:

    seconds of a shard = seconds of audio in it / RTFx of the worker

Workers differ in their RTFx, and fail at random. A failure loses the shard at hand: the worker
starts again and transcribes that shard from its beginning. Left out are: machines that fail as a
whole and take several workers with them, and reading, decoding and storage that are too slow.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf
from random import Random
from typing import Literal, NamedTuple

from asrkit.shapes import expect, whole

MOST_WORKERS = 10**6
MOST_SHARDS = 10**6
# A shard of so many mean times between failures takes 148 attempts on average; of more, too many.
MOST_FAILURE_TIMES = 5.0
ORDERS = ("parts", "queue")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers that transcribe the shards of one plan.

    Args:
        workers: How many.
        rtfx: Seconds of audio that a worker transcribes in a second, on average over them.
        spread: Relative standard deviation of that rate between workers, log-normal.
        startup_s: Seconds until a process transcribes: it is placed, starts and loads the model.
        failure_h: Mean hours between two failures of one worker, exponential; inf: none fails.
        order: "parts": worker K has every N-th shard from the K-th, as `--part K/N` does;
            "queue": whoever is free takes the next shard.
        seed: Of rates and failures.
    """

    workers: int
    rtfx: float
    spread: float = 0.0
    startup_s: float = 0.0
    failure_h: float = inf
    order: Literal["parts", "queue"] = "parts"
    seed: int = 0

    def __post_init__(self) -> None:
        many = whole(self.workers, 1, MOST_WORKERS)
        expect(many, "workers", f"a whole number in 1..{MOST_WORKERS:,}", self.workers)
        for name in ("rtfx", "failure_h"):
            value = getattr(self, name)
            expect(value > 0, name, "above 0", value)
        expect(self.rtfx < inf, "rtfx", "a finite number", self.rtfx)
        expect(0 <= self.spread <= 1, "spread", "0 to 1", self.spread)
        expect(0 <= self.startup_s < inf, "startup_s", "0 seconds or more", self.startup_s)
        expect(self.order in ORDERS, "order", "one of " + ", ".join(ORDERS), repr(self.order))


class Done(NamedTuple):
    """A transcribed shard: when, by which worker, and its number in the plan."""

    at_s: float
    worker: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a plan.

    Args:
        fleet: Who transcribed it.
        audio_s: Seconds of audio in all shards.
        done: Every shard once, in the order in which they were done.
        failures: Of all workers together.
        lost_s: Seconds of work that failures lost, of all workers together.
        idle_s: Seconds that workers waited for the last one, with nothing left to do.
    """

    fleet: Fleet
    audio_s: float
    done: list[Done]
    failures: int
    lost_s: float
    idle_s: float

    @property
    def seconds(self) -> float:
        """From the start until the last shard is done."""
        return self.done[-1].at_s

    @property
    def days(self) -> float:
        """`seconds` in days."""
        return self.seconds / 86_400

    @property
    def paid_s(self) -> float:
        """Seconds of all workers together, each paid until the last shard is done."""
        return self.fleet.workers * self.seconds

    @property
    def utilisation(self) -> float:
        """Share of `paid_s` that transcribing all shards once, at the full RTFx, would take."""
        return min(1.0, self.audio_s / self.fleet.rtfx / self.paid_s)

    @property
    def lost(self) -> float:
        """Share of `paid_s` that failures lost."""
        return self.lost_s / self.paid_s

    @property
    def idle(self) -> float:
        """Share of `paid_s` in which workers waited for the last one."""
        return self.idle_s / self.paid_s


def equal_shards(hours: float, shard_h: float) -> list[float]:
    """Seconds of audio in each shard of a plan whose recordings are short beside a shard.

    Args:
        hours: Of audio, in all.
        shard_h: Of audio, in a shard; the last one holds what is left.
    """
    expect(0 < hours < inf, "hours", "above 0", hours)
    expect(0 < shard_h < inf, "shard_h", "above 0 hours", shard_h)
    few = hours / shard_h <= MOST_SHARDS
    remedy = f"Make shards of {hours / MOST_SHARDS:g} hours or more."
    expect(few, "shard_h", f"at most {MOST_SHARDS:,} shards", f"{hours / shard_h:,.0f}", remedy)
    whole_ones = int(hours // shard_h)
    left_h = hours - whole_ones * shard_h
    rest = [left_h * 3600] if left_h > 1e-9 * hours else []
    return [shard_h * 3600] * whole_ones + rest


def simulate(shards: Sequence[float], fleet: Fleet) -> Outcome:
    """What becomes of a plan on a fleet; the same for the same seed.

    Args:
        shards: Seconds of audio in each shard, in the order of the plan: longest first.
        fleet: Who transcribes them.

    Raises:
        ValueError: There is no shard, or one takes so long that failures hardly ever let it end.
    """
    _expect_shards(shards)
    random = Random(fleet.seed)
    rates = _rates(fleet, random)
    failure_s = fleet.failure_h * 3600
    _expect_to_end(max(shards) / min(rates), failure_s)
    queues = _queues(len(shards), fleet)
    free = [(fleet.startup_s, worker) for worker in range(fleet.workers)]  # a heap: when, and who
    done: list[Done] = []
    ended_s: list[float] = []
    failures = 0
    lost_s = 0.0
    while free:
        at_s, worker = heapq.heappop(free)
        shard = next(queues[worker], None)
        if shard is None:
            ended_s.append(at_s)
            continue
        needed_s = shards[shard] / rates[worker]
        while failure_s < inf and (until_s := random.expovariate(1 / failure_s)) < needed_s:
            failures += 1
            lost_s += until_s + fleet.startup_s
            at_s += until_s + fleet.startup_s
        at_s += needed_s
        done.append(Done(at_s, worker, shard))
        heapq.heappush(free, (at_s, worker))
    done.sort()
    idle_s = sum(done[-1].at_s - at_s for at_s in ended_s)
    return Outcome(
        fleet=fleet,
        audio_s=sum(shards),
        done=done,
        failures=failures,
        lost_s=lost_s,
        idle_s=idle_s,
    )


def _expect_shards(shards: Sequence[float]) -> None:
    expect(len(shards) > 0, "shards", "at least one", "none")
    few = len(shards) <= MOST_SHARDS
    expect(few, "shards", f"at most {MOST_SHARDS:,}", f"{len(shards):,}")
    wrong = [seconds for seconds in shards if not 0 < seconds < inf]
    expect(not wrong, "shards", "finite seconds of audio, above 0", wrong[:1])


def _expect_to_end(longest_s: float, failure_s: float) -> None:
    """ValueError where the longest shard would hardly ever end between two failures."""
    limit_h = MOST_FAILURE_TIMES * failure_s / 3600
    expect(
        longest_s <= MOST_FAILURE_TIMES * failure_s,
        "shard_h",
        f"shards that a worker transcribes in at most {limit_h:,.4g} hours, as often as it fails",
        f"one of {longest_s / 3600:,.4g} hours",
        "Make smaller shards.",
    )


def _rates(fleet: Fleet, random: Random) -> list[float]:
    """Seconds of audio that each worker transcribes in a second."""
    drawn = [exp(random.gauss(0.0, fleet.spread)) for _ in range(fleet.workers)]
    scale = fleet.rtfx * fleet.workers / sum(drawn)  # the mean is `rtfx` in every fleet
    return [scale * rate for rate in drawn]


def _queues(shards: int, fleet: Fleet) -> list[Iterator[int]]:
    """The numbers of the shards of each worker, who all take from one list with "queue"."""
    if fleet.order == "queue":
        return [iter(range(shards))] * fleet.workers
    return [iter(range(worker, shards, fleet.workers)) for worker in range(fleet.workers)]
