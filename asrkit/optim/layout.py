"""Which part of which parameter lies on which rank.

All parameters one after another are one vector. It is cut into buckets, each bucket into a part for
each rank; the last bucket is padded to a multiple of the ranks. A part covers pieces of parameters:
several, one, or none where it lies in the padding.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Piece(NamedTuple):
    """Elements `start` to `stop` of a parameter, which lie in a buffer from `offset` on."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start


class Bucket(NamedTuple):
    """A part of the vector: `length` elements from `first` on, a multiple of the ranks."""

    first: int
    length: int


class Layout:
    """The cut of a vector of parameters.

    Args:
        sizes: elements of each parameter.
        ranks: that share the vector.
        most: elements of a bucket; rounded up to a multiple of the ranks.

    Attributes:
        buckets: in the order of the vector.
        ranks: as passed.
    """

    def __init__(self, sizes: Sequence[int], ranks: int, most: int) -> None:
        self.ranks = ranks
        self._starts = [0, *accumulate(sizes)]  # of each parameter, and the end of the last
        most = _round_up(most, ranks)
        total = self._starts[-1]
        self.buckets = []
        for first in range(0, total, most):
            length = min(most, _round_up(total - first, ranks))
            self.buckets.append(Bucket(first, length))

    def part(self, bucket: Bucket) -> int:
        """Elements of `bucket` that each rank has."""
        return bucket.length // self.ranks

    def shard_length(self) -> int:
        """Elements of all parts of a rank."""
        return sum(map(self.part, self.buckets))

    def pieces(self, first: int, last: int) -> list[Piece]:
        """The pieces of parameters from `first` to `last` of the vector; offsets are from `first`.

        Args:
            first: the first element.
            last: where it ends; padding has no pieces.
        """
        pieces = []
        parameter = bisect_right(self._starts, first) - 1
        while parameter < len(self._starts) - 1 and self._starts[parameter] < last:
            start = max(first, self._starts[parameter])
            stop = min(last, self._starts[parameter + 1])
            if stop > start:
                origin = self._starts[parameter]
                pieces.append(Piece(parameter, start - origin, stop - origin, start - first))
            parameter += 1
        return pieces

    def bucket_pieces(self, bucket: Bucket) -> list[Piece]:
        """The pieces of a bucket; offsets are from its first element."""
        return self.pieces(bucket.first, bucket.first + bucket.length)

    def part_pieces(self, bucket: Bucket, rank: int) -> list[Piece]:
        """The pieces of the part of `bucket` that `rank` has; offsets are from the part's first.

        Args:
            bucket: one of `buckets`.
            rank: from 0.
        """
        part = self.part(bucket)
        first = bucket.first + rank * part
        return self.pieces(first, first + part)

    def shard_pieces(self, rank: int) -> list[Piece]:
        """All pieces of a rank, where its parts lie one after another."""
        pieces = []
        offset = 0
        for bucket in self.buckets:
            for piece in self.part_pieces(bucket, rank):
                pieces.append(piece._replace(offset=offset + piece.offset))
            offset += self.part(bucket)
        return pieces


def _round_up(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple
