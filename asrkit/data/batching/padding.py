"""What padding costs: cost models of a padded batch, and the account of any sampler's batches under
one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asrkit.shapes import expect, expect_types

Pair = tuple[Any, Any]
TERMS = {
    "per_utterance": "1",
    "per_second": "D",
    "per_token": "U",
    "per_second2": "D²",
    "per_pair": "D·U",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a batch of n utterances, padded to D seconds and U tokens, costs in `unit`.

    cost(n, D, U) = per_batch + n (per_utterance + per_second D + per_token U + per_second2 D² +
    per_pair D U).
    """

    name: str
    unit: str
    source: str
    per_batch: float = 0.0
    per_utterance: float = 0.0
    per_second: float = 0.0
    per_token: float = 0.0
    per_second2: float = 0.0
    per_pair: float = 0.0

    def __post_init__(self) -> None:
        expect_types(self)
        known = {name: getattr(self, name) for name in ("per_batch", *TERMS)}
        bad = {name: value for name, value in known.items() if not 0 <= value < float("inf")}
        expect(not bad, ", ".join(bad), "finite and not below 0", [*bad.values()])

    def __call__(self, n: Any, D: Any, U: Any) -> Any:
        """Cost of padded batches; n, D and U are numbers or arrays of one shape, which the result
        has too.
        """
        D = np.asarray(D, dtype=np.float64)
        per_second = self.per_second + self.per_second2 * D + self.per_pair * U
        return self.per_batch + n * (self.per_utterance + per_second * D + self.per_token * U)

    def slopes(self, D: float, U: float) -> tuple[float, float]:
        """What a second and a token more cost an utterance of D seconds and U tokens."""
        return (
            self.per_second + 2 * self.per_second2 * D + self.per_pair * U,
            self.per_token + self.per_pair * D,
        )

    def useful(self, seconds: Any, tokens: Any) -> float:
        """What the utterances themselves cost, each at its own length and without `per_batch`."""
        return float(np.sum(self(1, seconds, tokens) - self.per_batch))

    @property
    def formula(self) -> str:
        """Its terms as text, e.g. `n (7.5 D + 0.4 U) GMAC`."""
        terms = [
            f"{value:.4g} {what}".removesuffix(" 1")
            for name, what in TERMS.items()
            if (value := getattr(self, name))
        ]
        return (
            f"{self.per_batch:.4g} + " * bool(self.per_batch)
            + f"n ({' + '.join(terms) or '0'}) {self.unit}"
        )


def linear(*, per_second: float = 1.0, per_token: float = 0.0) -> Cost:
    """Convolutions, recurrences and products: so much a second, so much a token, padded ones as
    well.
    """
    source = "each padded frame and token is computed like a real one"
    return Cost(
        name="linear", unit="padded s", source=source, per_second=per_second, per_token=per_token
    )


def attention(*, per_second: float = 1.0, quadratic: float = 20.0) -> Cost:
    """Linear plus attention of every frame to every frame: D + D² / quadratic, so that at
    `quadratic` seconds both weigh the same.

    The form of lhotse's `quadratic_duration` (lhotse.dataset.TimeConstraint), for which NeMo's
    documentation recommends 15 to 40.
    """
    expect(quadratic > 0, "quadratic", "seconds above 0", quadratic)
    source = "quadratic_duration of lhotse.dataset.TimeConstraint"
    return Cost(
        name="attention",
        unit="padded s",
        source=source,
        per_second=per_second,
        per_second2=per_second / quadratic,
    )


def transducer_joint(*, frames_per_second: float = 12.5, V: int = 1025, itemsize: int = 4) -> Cost:
    """Bytes of the joint's logits and their gradient: B T (U + 1) V numbers, twice (document 003;
    asrkit.workbench.cost.joint_bytes).
    """
    node = 2 * V * itemsize * frames_per_second
    return Cost(
        name="transducer joint",
        unit="B",
        source="2 B T (U + 1) V itemsize, document 003",
        per_second=node,
        per_pair=node,
    )


CANARY_COMPUTE = Cost(
    name="encoder-decoder",
    unit="GMAC",
    per_second=7.5,
    per_token=0.4,
    source="12.5 frames a second through 0.6 G parameters of an encoder, a token through 0.4 G of a decoder",
)
CANARY_MEMORY = Cost(
    name="encoder-decoder",
    unit="of a GPU",
    per_second=4.667e-4,
    per_token=2.896e-5,
    per_second2=7.721e-6,
    source="fitted to the batch sizes that NeMo's documentation prints for its OOMptimizer (docs/source/asr/datasets.rst): 60 "
    "cells of up to 40 s and 480 tokens, 2 % off in the mean, 7 % at most; which GPU is not said",
)


@dataclass(frozen=True)
class Limit:
    """No batch may cost more than `most`."""

    cost: Cost
    most: float

    def __post_init__(self) -> None:
        expect(self.most > 0, "most", "above 0", self.most)

    def share(self, n: Any, D: Any, U: Any) -> Any:
        """What batches of n utterances, padded to D seconds and U tokens, use of the limit; above 1
        they do not fit.
        """
        return self.cost(n, D, U) / self.most

    def largest(self, D: Any, U: Any) -> Any:
        """Most utterances of at most D seconds and U tokens that fit; 0 where not even one does."""
        one = self.cost(1, D, U) - self.cost.per_batch
        room = (
            self.most - self.cost.per_batch + 1e-290
        )  # so that what costs nothing fits where nothing is left, too
        n = np.floor(room / np.maximum(one, 1e-300)).clip(0, 2**31).astype(np.int64)
        fits = self.share(n, D, U) <= 1, self.share(n + 1, D, U) <= 1
        return np.where(fits[1], n + 1, np.where(fits[0], n, (n - 1).clip(0)))  # as rounding has it


def at_most_utterances(n: int) -> Limit:
    """Batches of one size, whatever their length."""
    return Limit(Cost(name="batch size", unit="utterances", source="n", per_utterance=1.0), n)


def at_most_seconds(seconds: float, *, quadratic: float | None = None) -> Limit:
    """Padded seconds a batch, as lhotse's `max_duration`; `quadratic` makes of each D seconds D +
    D² / quadratic.
    """
    return Limit(linear() if quadratic is None else attention(quadratic=quadratic), seconds)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the work of a run went. Shares are of 1; `utilisation` is what was useful of all that
    the ranks could have done.
    """

    batches: int
    steps: int
    utterances: int
    hours: float  # of speech
    batch_size: float  # utterances a batch, mean
    audio_padding: float  # share of padded seconds n D that is padding
    token_padding: float  # of padded tokens n U
    lattice_padding: float  # of n D U, a transducer's lattice: what packing leaves out
    compute_padding: float  # of the cost
    memory: float | None  # share of the limit that a batch uses, mean; None without a limit
    memory_max: float | None
    straggler: float  # share of the ranks' time in which they wait for the slowest of their step
    utilisation: float  # useful cost over ranks x slowest rank, summed over the steps


def padding_account(
    batches: Iterable[Pair], *, cost: Cost, limit: Limit | None = None, ranks: int = 1
) -> Account:
    """The account of batches of (seconds, tokens), two arrays or lists each, in the order in which
    they are trained on.

    Batch k belongs to step k // ranks. Every step lasts as long as its costliest batch; ranks
    without a batch wait. What small kernels, launches and communication cost is not in it, so
    utilisation is an upper bound.
    """
    expect(ranks >= 1, "ranks", "at least 1", ranks)
    table = np.array([_row(cost, *pair) for pair in batches], dtype=np.float64).reshape(-1, 7)
    expect(len(table) > 0, "batches", "at least one", "none")
    n, D, U, seconds, tokens, nodes, useful = table.T
    padded = cost(n, D, U)
    steps = -(-len(table) // ranks)
    slowest = np.pad(padded, (0, steps * ranks - len(padded))).reshape(steps, ranks).max(1).sum()
    memory = None if limit is None else limit.share(n, D, U)
    expect(slowest > 0, "cost", "above 0 for these batches", slowest)

    def padding(real: np.ndarray, of: np.ndarray) -> float:
        return 1 - float(real.sum() / of.sum()) if of.sum() else 0.0

    return Account(
        batches=len(table),
        steps=steps,
        utterances=int(n.sum()),
        hours=float(seconds.sum()) / 3600,
        batch_size=float(n.mean()),
        audio_padding=padding(seconds, n * D),
        token_padding=padding(tokens, n * U),
        lattice_padding=padding(nodes, n * D * U),
        compute_padding=padding(useful, padded - cost.per_batch),
        memory=None if memory is None else float(memory.mean()),
        memory_max=None if memory is None else float(memory.max()),
        straggler=1 - float(padded.sum() / (ranks * slowest)),
        utilisation=float(useful.sum() / (ranks * slowest)),
    )


def _row(cost: Cost, seconds: Sequence[float], tokens: Sequence[int]) -> tuple[float, ...]:
    D, U = (
        np.asarray(part, dtype=np.float64) for part in (seconds, tokens)
    )  # whole numbers have an end
    expect(
        D.ndim == 1 and D.shape == U.shape and len(D) > 0,
        "batches",
        "seconds and tokens of each utterance",
        (D.shape, U.shape),
    )
    real = bool(D.min() > 0 and U.min() >= 0 and np.isfinite(D.sum() + U.sum()))
    expect(real, "batches", "finite seconds above 0, and tokens not below", (D.min(), U.min()))
    return len(D), D.max(), U.max(), D.sum(), U.sum(), float(D @ U), cost.useful(D, U)
