"""The cost of padding: cost models of a padded batch, limits, and accounts of batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asrkit.models.lstm import fewest_cells
from asrkit.shapes import expect, expect_types, whole

TERMS = {
    "per_utterance": "",
    "per_second": "D",
    "per_token": "U",
    "per_second2": "D²",
    "per_pair": "D·U",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a batch of n utterances that are padded to D seconds and U tokens.

    cost(n, D, U) = per_batch + n (per_utterance + per_second D + per_token U + per_second2 D² +
    per_pair D U), in `unit`. `source` names the source of the numbers.
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
        for name in ("per_batch", *TERMS):
            value = getattr(self, name)
            expect(value >= 0, name, "not below 0", value)

    def __call__(self, n: Any, D: Any, U: Any) -> Any:
        """Cost of padded batches, in `unit`.

        Args:
            n: Number of utterances in each batch.
            D: Seconds that they are padded to.
            U: Tokens that they are padded to.

        All three are numbers, or arrays of one shape, which is that of the result too.
        """
        D = np.asarray(D, dtype=np.float64)
        per_second = self.per_second + self.per_second2 * D + self.per_pair * U
        per_utterance = self.per_utterance + per_second * D + self.per_token * U
        return self.per_batch + n * per_utterance

    def slopes(self, D: float, U: float) -> tuple[float, float]:
        """Costs of one more second and of one more token, at D seconds and U tokens."""
        one_second = self.per_second + 2 * self.per_second2 * D + self.per_pair * U
        one_token = self.per_token + self.per_pair * D
        return one_second, one_token

    @property
    def formula(self) -> str:
        """The terms as text, e.g. `n (7.5 D + 0.4 U) GMAC`."""
        values = {symbol: getattr(self, name) for name, symbol in TERMS.items()}
        terms = [f"{value:,.6g} {symbol}".strip() for symbol, value in values.items() if value]
        per_batch = f"{self.per_batch:.4g} + " if self.per_batch else ""
        return f"{per_batch}n ({' + '.join(terms) or '0'}) {self.unit}"


def linear() -> Cost:
    """Cost of convolutions, recurrences and matrix products, which compute padding too."""
    return Cost(
        name="linear",
        unit="padded s",
        source="each padded frame is computed like a real one",
        per_second=1.0,
    )


def attention(*, quadratic: float = 20.0) -> Cost:
    """Linear cost plus that of attention between all pairs of frames: D + D² / quadratic.

    The form of lhotse's `quadratic_duration` (lhotse.dataset.TimeConstraint), for which NeMo's
    documentation recommends 15 to 40.

    Args:
        quadratic: Seconds at which both terms are equal.
    """
    expect(quadratic > 0, "quadratic", "seconds above 0", quadratic)
    return Cost(
        name="attention",
        unit="padded s",
        source="quadratic_duration of lhotse.dataset.TimeConstraint",
        per_second=1.0,
        per_second2=1 / quadratic,
    )


def transducer_joint() -> Cost:
    """Bytes of the joint's logits and their gradient: B T (U + 1) V numbers, twice.

    With 12.5 encoder frames per second, 1025 tokens (blank included) and float32. The formula of
    NVIDIA's "Training NeMo RNN-T Models Efficiently with Numba FP16 Support" (document 003 in
    data/claims.yaml). Other tensors are not counted: see `asrkit.training.joint_peak_bytes`.
    """
    bytes_per_node = 2 * 1025 * 4 * 12.5
    return Cost(
        name="transducer joint",
        unit="B",
        source="2 B T (U + 1) V itemsize, NVIDIA's account of its Numba loss",
        per_second=bytes_per_node,
        per_pair=bytes_per_node,
    )


CANARY_COMPUTE = Cost(
    name="encoder-decoder",
    unit="GMAC",
    per_second=7.5,
    per_token=0.4,
    source="12.5 frames a second through 0.6 G parameters of an encoder, a token through 0.4 G of "
    "a decoder",
)
CANARY_MEMORY = Cost(
    name="encoder-decoder",
    unit="of a GPU",
    per_second=4.667e-4,
    per_token=2.896e-5,
    per_second2=7.721e-6,
    source="fitted to the batch sizes that NeMo's documentation prints for its OOMptimizer "
    "(docs/source/asr/datasets.rst): 60 cells of up to 40 s and 480 tokens, 2 % off in the mean, "
    "7 % at most; the GPU is not stated",
)


@dataclass(frozen=True)
class Limit:
    """A limit for batches: none may cost more than `most`, in the unit of `cost`."""

    cost: Cost
    most: float

    def __post_init__(self) -> None:
        expect(self.most > 0, "most", "above 0", self.most)

    def share(self, n: Any, D: Any, U: Any) -> Any:
        """Share of the limit that batches use; batches above 1 do not fit.

        Args:
            n: Number of utterances in each batch.
            D: Seconds that they are padded to.
            U: Tokens that they are padded to.
        """
        return self.cost(n, D, U) / self.most

    def largest(self, D: Any, U: Any) -> Any:
        """Most utterances of at most D seconds and U tokens that fit; 0 if not even one does."""
        per_utterance = self.cost(1, D, U) - self.cost.per_batch
        # the tiny summand lets utterances without cost fit where no room is left
        room = self.most - self.cost.per_batch + 1e-290
        quotient = room / np.maximum(per_utterance, 1e-300)
        # the division may have been rounded down; if this is one too many, subtract it again
        n = np.floor(quotient * (1 + 1e-12)).clip(0, 2**31).astype(np.int64)
        return np.where(self.share(n, D, U) <= 1, n, (n - 1).clip(0))


def at_most_utterances(n: int) -> Limit:
    """Limit of n utterances a batch, of any length."""
    return Limit(Cost(name="batch size", unit="utterances", source="n", per_utterance=1.0), n)


def at_most_seconds(seconds: float, *, quadratic: float | None = None) -> Limit:
    """Limit of padded seconds a batch, like lhotse's `max_duration`.

    Args:
        seconds: The limit.
        quadratic: Count an utterance of D seconds as D + D² / quadratic, as `attention` does.
    """
    return Limit(linear() if quadratic is None else attention(quadratic=quadratic), seconds)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Use of the work of a run. Paddings, memory, straggler and utilisation are shares of 1."""

    batches: int
    steps: int
    utterances: int
    hours: float  # of speech
    batch_size: float  # mean utterances a batch
    audio_padding: float  # share of the computed seconds (n D, or fewer in phases) that is padding
    token_padding: float  # share of the padded tokens n U that is padding
    lattice_padding: float  # share of n D U, a transducer's lattices, that packing would omit
    compute_padding: float  # share of the cost that is spent on padding
    memory: float | None  # mean share of the limit that a batch uses; None without a limit
    memory_max: float | None
    straggler: float  # share of the ranks' time spent waiting for the slowest rank of a step
    utilisation: float  # useful cost over ranks x slowest rank, summed over the steps


def computed_seconds(seconds: Sequence[float] | np.ndarray, phases: int = 1) -> float:
    """Seconds that a batch computes in phases, speech and padding together.

    Args:
        seconds: Seconds of each utterance (B,).
        phases: Largest number of phases, as in LSTMEncoderConfig; 1 computes B times the longest.
            Ends of phases are not rounded to stacked frames.

    >>> computed_seconds([10, 9, 4, 4]), computed_seconds([10, 9, 4, 4], phases=2)
    (40.0, 28.0)
    """
    lengths = np.asarray(seconds, dtype=np.float64)
    if phases == 1:
        return float(len(lengths) * lengths.max())
    total = 0.0
    start = 0.0
    for end, rows in fewest_cells(lengths, phases):
        total += (end - start) * rows
        start = end
    return total


def padding_account(
    batches: Iterable[tuple[Any, Any]],
    *,
    cost: Cost,
    limit: Limit | None = None,
    ranks: int = 1,
    phases: int = 1,
) -> Account:
    """Account of padding and waiting in a sequence of batches.

    Every step takes as long as its most expensive batch; ranks without a batch wait. Small kernels,
    launches and communication are not counted, so `utilisation` is an upper bound.

    Args:
        batches: (seconds, tokens) of each batch, two arrays or lists each, in training order.
            Batch k belongs to step k // ranks.
        cost: Compute cost of a batch.
        limit: Memory limit, for `memory` and `memory_max`.
        ranks: Number of ranks that train together.
        phases: Number of phases in which an encoder runs each batch (LSTMEncoderConfig), which
            reduces the computed seconds. Lattices and memory stay those of the longest utterance.
            The cost must be linear in seconds.
    """
    valid = whole(ranks, 1) and whole(phases, 1)
    expect(valid, "ranks, phases", "whole numbers of at least 1", (ranks, phases))
    linear_cost = cost.per_second2 == cost.per_pair == 0
    remedy = "Only recurrent layers run in phases."
    expect(phases == 1 or linear_cost, "cost", "one linear in seconds", cost.formula, remedy)
    rows = [_row(cost, *pair, phases) for pair in batches]
    expect(len(rows) > 0, "batches", "at least one", "none")
    n, D, U, seconds, tokens, nodes, useful, computed = np.array(rows, dtype=np.float64).T
    padded_cost = cost(n, computed / n, U)
    steps = -(-len(rows) // ranks)
    of_ranks = np.pad(padded_cost, (0, steps * ranks - len(rows))).reshape(steps, ranks)
    available = ranks * of_ranks.max(1).sum()
    shares = None if limit is None else limit.share(n, D, U)
    return Account(
        batches=len(rows),
        steps=steps,
        utterances=int(n.sum()),
        hours=float(seconds.sum()) / 3600,
        batch_size=float(n.mean()),
        audio_padding=_padding(seconds, computed),
        token_padding=_padding(tokens, n * U),
        lattice_padding=_padding(nodes, n * D * U),
        compute_padding=_padding(useful, padded_cost - cost.per_batch),
        memory=None if shares is None else float(shares.mean()),
        memory_max=None if shares is None else float(shares.max()),
        straggler=1 - float(padded_cost.sum() / available),
        utilisation=float(useful.sum() / available),
    )


def _padding(real: np.ndarray, padded: np.ndarray) -> float:
    """Share of `padded` that is not `real`; 0 if nothing is padded."""
    total = padded.sum()
    return 1 - float(real.sum() / total) if total else 0.0


def _row(
    cost: Cost, seconds: Sequence[float], tokens: Sequence[int], phases: int
) -> tuple[Any, ...]:
    """n, D, U, sums of seconds, of tokens and of their products, useful cost, computed seconds."""
    D = np.asarray(seconds, dtype=np.float64)
    U = np.asarray(tokens, dtype=np.float64)  # float64, since sums of integers may overflow
    fits = D.ndim == 1 and D.shape == U.shape and len(D) > 0
    possible = fits and D.min() > 0 and U.min() >= 0 and np.isfinite(D.sum() + U.sum())
    expect(bool(possible), "batches", "seconds above 0 and tokens of each utterance", (D, U))
    useful = np.sum(cost(1, D, U) - cost.per_batch)  # each at its own length
    computed = computed_seconds(D, phases)
    return len(D), D.max(), U.max(), D.sum(), U.sum(), D @ U, useful, computed
