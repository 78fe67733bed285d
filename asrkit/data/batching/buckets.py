"""Bucket tables: cells of seconds and tokens, their batch sizes, and the choice of borders."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import Limit
from asrkit.files import atomic
from asrkit.shapes import expect


@dataclass(frozen=True, eq=False)
class Buckets:
    """A table of K buckets, sorted by seconds, then by tokens.

    An utterance belongs to the first bucket that fits it.

    Attributes:
        seconds: Longest utterance of each bucket in seconds, (K,) float64.
        tokens: Most tokens of an utterance of each bucket, (K,) int64.
        sizes: Utterances in a batch of each bucket, (K,) int64.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("seconds", np.float64), ("tokens", np.int64), ("sizes", np.int64)):
            object.__setattr__(self, name, np.array(getattr(self, name), dtype=dtype))
        K = len(self.seconds)
        shapes = (self.seconds.shape, self.tokens.shape, self.sizes.shape)
        wanted = "equally many seconds, tokens and sizes, at least one"
        expect(K > 0 and shapes == ((K,), (K,), (K,)), "buckets", wanted, shapes)
        in_order = np.lexsort((self.tokens, self.seconds)) == np.arange(K)
        valid = in_order & (self.seconds > 0) & (self.tokens >= 0) & (self.sizes >= 1)
        wanted = "cells of seconds above 0 and tokens, sorted by both, with sizes of at least 1"
        expect(bool(valid.all()), "buckets", wanted, (self.seconds, self.tokens, self.sizes))

    def __len__(self) -> int:
        return len(self.seconds)

    def cell(self, lengths: Lengths, *, above: int = -1) -> np.ndarray:
        """Number of the first bucket that fits each utterance, (N,) int64; -1 for none.

        Args:
            lengths: Lengths of N utterances.
            above: Only buckets after this one are considered.
        """
        numbers = np.full(len(lengths), -1)
        for k in range(len(self) - 1, above, -1):
            short_enough = lengths.seconds <= self.seconds[k]
            few_enough = lengths.tokens <= self.tokens[k]
            numbers[short_enough & few_enough] = k
        return numbers

    def sized(self, limit: Limit) -> "Buckets":
        """The same buckets with the largest batch sizes that a limit allows, at least 1.

        Args:
            limit: Limit for batches in which every utterance is as long as its bucket allows.
        """
        return replace(self, sizes=np.maximum(1, limit.largest(self.seconds, self.tokens)))

    def share(self, n: Any, D: Any, U: Any) -> Any:
        """Share of a bucket's size that batches use, so that a table limits any strategy.

        Args:
            n: Number of utterances in each batch.
            D: Seconds that they are padded to, (M,).
            U: Tokens that they are padded to, (M,).

        Returns:
            n over the size of the first bucket that fits, (M,); infinity if none does.
        """
        fits = (D[:, None] <= self.seconds) & (U[:, None] <= self.tokens)  # (M, K)
        return np.where(fits.any(1), n / self.sizes[fits.argmax(1)], np.inf)

    def columns(self) -> dict[str, list]:
        """The table as lists of numbers."""
        return {name: values.tolist() for name, values in vars(self).items()}

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, for `read`."""
        with atomic(path) as part:
            part.write_text(json.dumps(self.columns()) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> "Buckets":
        """Read a table that `save` wrote.

        Raises:
            ValueError: The file cannot be read, or is not such a table.
        """
        try:
            table = json.loads(Path(path).read_text())
            return cls(table["seconds"], table["tokens"], table["sizes"])
        except Exception as error:  # errors of json, numpy and the file system
            got = f"{str(path)!r} ({type(error).__name__}: {str(error).rstrip('.')})"
            raise ValueError(
                f"bucket_sizes: expected JSON with seconds, tokens and sizes, got {got}."
            ) from None


def duration_bins(lengths: Lengths, count: int) -> np.ndarray:
    """Upper borders in seconds of bins that hold the same duration of speech each.

    All lengths count; lhotse's estimate_duration_buckets reads the first 10,000 cuts by default.

    Args:
        lengths: Lengths of at least one utterance.
        count: Largest number of bins.

    Returns:
        At most `count` borders, ascending; the last is the longest utterance.
    """
    expect(len(lengths) > 0, "lengths", "at least one utterance", "none")
    return _borders(np.sort(lengths.seconds), count)


def usual_rates(lengths: Lengths, *, count: int = 30, deviations: float = 4.0) -> np.ndarray:
    """Utterances without far more tokens per second than others of similar duration: (N,) bool.

    One utterance with many tokens raises the tokens of its whole bucket, and so lowers its size.
    NeMo's estimate of buckets omits such utterances in the same way.

    Args:
        lengths: Lengths of N utterances, at least one.
        count: Largest number of bins of duration.
        deviations: Standard deviations above the mean rate of a bin, from which utterances are
            omitted.
    """
    bins = np.searchsorted(duration_bins(lengths, count), lengths.seconds)
    rates = lengths.tokens_per_second
    sizes = np.bincount(bins)
    above = rates - (np.bincount(bins, rates) / sizes)[bins]
    deviation = np.sqrt(np.bincount(bins, above**2) / sizes)[bins]
    return above <= deviations * deviation


def _borders(ascending: np.ndarray, count: int) -> np.ndarray:
    """At most `count` upper borders that divide the sum of sorted values into equal parts."""
    expect(count >= 1, "count", "at least 1", count)
    cumulated = np.cumsum(ascending)
    targets = cumulated[-1] * np.arange(1, count) / count
    positions = np.searchsorted(cumulated, targets)
    inner = ascending[positions.clip(max=len(ascending) - 1)]
    return np.unique(np.append(inner, ascending[-1]))


def buckets_1d(lengths: Lengths, limit: Limit, *, count: int = 30) -> Buckets:
    """Buckets of seconds alone.

    Args:
        lengths: Lengths of the utterances to batch.
        limit: Limit that sizes each bucket, by its longest utterance and most tokens.
        count: Largest number of buckets.
    """
    seconds = duration_bins(lengths, count)
    bins = np.searchsorted(seconds, lengths.seconds)
    most_tokens = [lengths.tokens[bins == k].max() for k in range(len(seconds))]
    # never fewer tokens than the previous bin, so that its tail fits into the next one
    tokens = np.maximum.accumulate(np.array(most_tokens))
    return Buckets(seconds, tokens, np.ones_like(tokens)).sized(limit)


def buckets_2d(lengths: Lengths, limit: Limit, *, count: int = 30, parts: int = 5) -> Buckets:
    """Buckets of seconds, each divided by tokens.

    Args:
        lengths: Lengths of the utterances to batch.
        limit: Limit that sizes each bucket, by its longest utterance and most tokens.
        count: Largest number of bins of seconds.
        parts: Largest number of cells in a bin. All have the same sum of tokens; the last one fits
            the most tokens that occur in the bin.
    """
    bins = duration_bins(lengths, count)
    bin_of_row = np.searchsorted(bins, lengths.seconds)
    borders = [_borders(np.sort(lengths.tokens[bin_of_row == k]), parts) for k in range(len(bins))]
    seconds = np.repeat(bins, [len(tokens) for tokens in borders])
    return Buckets(seconds, np.concatenate(borders), np.ones_like(seconds)).sized(limit)
