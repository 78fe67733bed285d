"""Batch tables: cells of seconds (and tokens) with a batch size each, and where to put their
borders.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import Limit
from asrkit.files import atomic
from asrkit.shapes import expect

ENDLESS = 2**62  # tokens of a cell that does not ask for them


@dataclass(frozen=True, eq=False)
class Buckets:
    """K cells: utterances of at most seconds[k] (float64) and tokens[k] (int64), of which sizes[k]
    (int64) make a batch.

    Sorted by seconds, then tokens; an utterance belongs to the first cell that has room for it.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray

    def __post_init__(self) -> None:
        for name, kind in (("seconds", np.float64), ("tokens", np.int64), ("sizes", np.int64)):
            object.__setattr__(self, name, np.array(getattr(self, name), dtype=kind))
        K, shapes = len(self.seconds), (self.seconds.shape, self.tokens.shape, self.sizes.shape)
        expect(
            K > 0 and shapes == ((K,),) * 3,
            "buckets",
            "as many seconds as tokens as sizes, and one at least",
            shapes,
        )
        real = bool((self.seconds > 0).all() and (self.tokens >= 0).all())
        expect(
            real,
            "buckets",
            "seconds above 0, tokens not below",
            list(zip(self.seconds, self.tokens, strict=True))[:5],
        )
        sorted_ = np.array_equal(np.lexsort((self.tokens, self.seconds)), np.arange(K))
        expect(
            sorted_,
            "buckets",
            "cells sorted by seconds, then tokens",
            list(zip(self.seconds, self.tokens, strict=True))[:5],
        )
        expect(
            bool((self.sizes >= 1).all()), "sizes", "at least 1 in each bucket", self.sizes.min()
        )

    def __len__(self) -> int:
        return len(self.seconds)

    def cell(self, lengths: Lengths, *, above: int = -1) -> np.ndarray:
        """(N,): the first cell after `above` with room for each utterance, -1 where there is none."""
        found = np.full(len(lengths), -1)
        for k in range(len(self) - 1, above, -1):
            found[(lengths.seconds <= self.seconds[k]) & (lengths.tokens <= self.tokens[k])] = k
        return found

    def sized(self, limit: Limit) -> "Buckets":
        """The same cells, with as many utterances a batch as fit the limit at a cell's full length,
        but at least one.
        """
        return replace(self, sizes=np.maximum(1, limit.largest(self.seconds, self.tokens)))

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        table = {name: getattr(self, name).tolist() for name in ("seconds", "tokens", "sizes")}
        with atomic(path) as part:
            part.write_text(json.dumps(table))

    @classmethod
    def read(cls, path: str | Path) -> "Buckets":
        """A table as `save` wrote it."""
        try:
            table: dict[str, Any] = json.loads(Path(path).read_text())
            return cls(*(np.array(table[name]) for name in ("seconds", "tokens", "sizes")))
        except (OSError, UnicodeDecodeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"buckets: expected JSON with seconds, tokens and sizes, got {error!r} in {path}."
            ) from None


def duration_bins(lengths: Lengths, count: int) -> np.ndarray:
    """Upper borders of at most `count` bins with the same seconds of speech in each, over all
    lengths; the last is the longest.

    lhotse's estimate_duration_buckets looks at the first 10,000 cuts by default.
    """
    expect(len(lengths) > 0, "lengths", "at least one utterance", "none")
    return _borders(np.sort(lengths.seconds), count)


def _borders(ascending: np.ndarray, count: int) -> np.ndarray:
    expect(count >= 1, "count", "at least 1", count)
    total = np.cumsum(ascending)
    at = np.searchsorted(total, total[-1] * np.arange(1, count) / count)
    return np.unique(np.append(ascending[at.clip(max=len(ascending) - 1)], ascending[-1]))


def buckets_1d(lengths: Lengths, limit: Limit, *, count: int = 30) -> Buckets:
    """Bins of seconds, each sized for the most tokens that occur in it."""
    seconds = duration_bins(lengths, count)
    bins = np.searchsorted(seconds, lengths.seconds)
    tokens = np.array([lengths.tokens[bins == k].max() for k in range(len(seconds))])
    tokens = np.maximum.accumulate(tokens)  # so that a tail finds room in the next bin
    return Buckets(seconds, tokens, np.ones_like(tokens)).sized(limit)


def buckets_2d(lengths: Lengths, limit: Limit, *, count: int = 30, parts: int = 5) -> Buckets:
    """Bins of seconds, in each at most `parts` cells with the same number of tokens; the last holds
    the most that occur there.
    """
    bins = duration_bins(lengths, count)
    of_bin = np.searchsorted(bins, lengths.seconds)
    cells = [
        (edge, most)
        for k, edge in enumerate(bins)
        for most in _borders(np.sort(lengths.tokens[of_bin == k]), parts)
    ]
    seconds, tokens = zip(*cells, strict=True)
    return Buckets(np.array(seconds), np.array(tokens), np.ones(len(cells))).sized(limit)
