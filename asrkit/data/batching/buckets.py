"""Bucket tables: cells of seconds and tokens with a batch size each, and where to put borders."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import Limit
from asrkit.files import atomic
from asrkit.shapes import expect

ENDLESS = 2**62  # tokens of a cell without a bound on tokens
DTYPES = {"seconds": np.float64, "tokens": np.int64, "sizes": np.int64}


@dataclass(frozen=True, eq=False)
class Buckets:
    """A table of K buckets, sorted by seconds, then by tokens.

    An utterance belongs to the first bucket that has room for it.

    Attributes:
        seconds: Longest utterance of each bucket in seconds, (K,) float64.
        tokens: Most tokens of an utterance of each bucket, (K,) int64.
        sizes: Utterances in a batch of each bucket, (K,) int64.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in DTYPES.items():
            column = np.array(getattr(self, name), dtype=dtype)
            object.__setattr__(self, name, column)
        K = len(self.seconds)
        shapes = (self.seconds.shape, self.tokens.shape, self.sizes.shape)
        valid = K > 0 and shapes == ((K,), (K,), (K,))
        wanted = "as many seconds as tokens as sizes, and one at least"
        expect(valid, "buckets", wanted, shapes)
        cells = list(zip(self.seconds, self.tokens, strict=True))
        first_cells = cells[:5]
        positive = bool((self.seconds > 0).all() and (self.tokens >= 0).all())
        expect(positive, "buckets", "seconds above 0, tokens not below", first_cells)
        order = np.lexsort((self.tokens, self.seconds))
        ascending = np.array_equal(order, np.arange(K))
        expect(ascending, "buckets", "cells sorted by seconds, then tokens", first_cells)
        smallest = self.sizes.min()
        expect(bool(smallest >= 1), "sizes", "at least 1 in each bucket", smallest)

    def __len__(self) -> int:
        return len(self.seconds)

    def cell(self, lengths: Lengths, *, above: int = -1) -> np.ndarray:
        """Number of the first bucket with room for each utterance, (N,) int64; -1 for none.

        Args:
            lengths: Of N utterances.
            above: Only buckets after this one are considered.
        """
        numbers = np.full(len(lengths), -1)
        for k in range(len(self) - 1, above, -1):
            short_enough = lengths.seconds <= self.seconds[k]
            few_enough = lengths.tokens <= self.tokens[k]
            numbers[short_enough & few_enough] = k
        return numbers

    def sized(self, limit: Limit) -> "Buckets":
        """The same buckets with the largest batch sizes, at least 1, that a limit allows.

        Args:
            limit: Applied to batches in which every utterance is as long as its bucket allows.
        """
        allowed = limit.largest(self.seconds, self.tokens)
        sizes = np.maximum(1, allowed)
        return replace(self, sizes=sizes)

    def save(self, path: str | Path) -> None:
        """Write the table as JSON to `path`."""
        table = {name: getattr(self, name).tolist() for name in DTYPES}
        with atomic(path) as part:
            part.write_text(json.dumps(table))

    @classmethod
    def read(cls, path: str | Path) -> "Buckets":
        """Read a table that `save` wrote to `path`."""
        try:
            table: dict[str, Any] = json.loads(Path(path).read_text())
            columns = {name: np.array(table[name]) for name in DTYPES}
            return cls(**columns)
        except (OSError, UnicodeDecodeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"buckets: expected JSON with seconds, tokens and sizes, got {error!r} in {path}."
            ) from None


def duration_bins(lengths: Lengths, count: int) -> np.ndarray:
    """Upper borders in seconds of bins that hold the same duration of speech each.

    All lengths are taken into account; lhotse's estimate_duration_buckets looks at the first
    10,000 cuts by default.

    Args:
        lengths: Of at least one utterance.
        count: Most bins.

    Returns:
        At most `count` borders, ascending; the last is the longest utterance.
    """
    expect(len(lengths) > 0, "lengths", "at least one utterance", "none")
    return _borders(np.sort(lengths.seconds), count)


def _borders(ascending: np.ndarray, count: int) -> np.ndarray:
    """At most `count` upper borders that split the sum of sorted values into equal parts."""
    expect(count >= 1, "count", "at least 1", count)
    cumulated = np.cumsum(ascending)
    total = cumulated[-1]
    targets = total * np.arange(1, count) / count
    positions = np.searchsorted(cumulated, targets)
    last = len(ascending) - 1
    inner = ascending[positions.clip(max=last)]
    borders = np.append(inner, ascending[last])
    return np.unique(borders)


def buckets_1d(lengths: Lengths, limit: Limit, *, count: int = 30) -> Buckets:
    """Buckets of seconds alone.

    Args:
        lengths: Of the utterances that are to be batched.
        limit: Sizes each bucket, for its longest utterance and the most tokens that occur in it.
        count: Most buckets.
    """
    seconds = duration_bins(lengths, count)
    bins = np.searchsorted(seconds, lengths.seconds)
    most_tokens = [lengths.tokens[bins == k].max() for k in range(len(seconds))]
    # Never fewer tokens than the bin before, so that its tail finds room in the next one.
    tokens = np.maximum.accumulate(np.array(most_tokens))
    unsized = Buckets(seconds, tokens, np.ones_like(tokens))
    return unsized.sized(limit)


def buckets_2d(lengths: Lengths, limit: Limit, *, count: int = 30, parts: int = 5) -> Buckets:
    """Buckets of seconds, each divided by tokens.

    Args:
        lengths: Of the utterances that are to be batched.
        limit: Sizes each bucket, for its longest utterance and most tokens.
        count: Most bins of seconds.
        parts: Most cells in each bin. They hold the same number of tokens each; the last has room
            for the most tokens that occur in the bin.
    """
    bins = duration_bins(lengths, count)
    bin_of_row = np.searchsorted(bins, lengths.seconds)
    seconds = []
    tokens = []
    for k, longest in enumerate(bins):
        in_bin = lengths.tokens[bin_of_row == k]
        borders = _borders(np.sort(in_bin), parts)
        seconds += [longest] * len(borders)
        tokens += borders.tolist()
    ones = np.ones(len(tokens))
    unsized = Buckets(np.array(seconds), np.array(tokens), ones)
    return unsized.sized(limit)
