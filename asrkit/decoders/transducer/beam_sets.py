"""The sets of hypotheses that `transducer_beam` keeps: for each utterance, the best so far."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.states import map_state


class HypothesisSet(NamedTuple):
    """n hypotheses of each utterance, likeliest first; all tensors (B, ..., n).

    A score of -inf marks an empty place.
    """

    score: Tensor  # float
    key: Tensor  # int64, hash of the prefix
    length: Tensor  # int64, labels
    node: Tensor  # int64, index of the last label in the history; -1 before the first
    # int64, index in the pool of the state of the prefix, or of all but its last label
    cell: Tensor
    label: Tensor  # int64, the last label if that state does not include it yet, else -1

    def gather(self, place: Tensor) -> "HypothesisSet":
        """The hypotheses with indices `place` (B, ..., m)."""
        return map_state(lambda part: part.gather(-1, place), self)

    def without(self, dropped: Tensor) -> "HypothesisSet":
        """The same with the places that `dropped` marks empty."""
        return self._replace(score=self.score.masked_fill(dropped, -torch.inf))

    def repeated(self, n: int) -> "HypothesisSet":
        """n copies of the hypotheses (B, K), as a view: (B, n, K)."""
        return map_state(lambda part: part[:, None].expand(-1, n, -1), self)


def join_sets(sets: Iterable[HypothesisSet]) -> HypothesisSet:
    """All hypotheses of several sets as one set, unmerged."""
    return map_state(lambda *parts: torch.cat(parts, -1), *sets)


def merge(hypotheses: HypothesisSet, width: int) -> HypothesisSet:
    """The `width` best label sequences of (B, ..., n), with the probabilities of equal ones added.

    Of equal sequences the likelier one stays. Two are equal if length and hash are: 64 bits, so a
    million comparisons go wrong once in 10^13 times.
    """
    score = hypotheses.score
    same = _equal_pairs(hypotheses.key) & _equal_pairs(hypotheses.length)
    own = score[..., :, None]
    other = score[..., None, :]
    total = torch.where(same, other, -torch.inf).logsumexp(-1)
    earlier = torch.ones_like(same).tril(-1)
    likelier = (other > own) | ((other == own) & earlier)
    beaten = (same & likelier).any(-1)
    dropped = total.isnan() | beaten
    best, place = total.masked_fill(dropped, -torch.inf).topk(width)
    return hypotheses.gather(place)._replace(score=best)


def _equal_pairs(numbers: Tensor) -> Tensor:
    """Which pairs of (..., n) numbers are equal: bool (..., n, n)."""
    return numbers[..., :, None] == numbers[..., None, :]


def set_at(sets: HypothesisSet, index: int) -> HypothesisSet:
    """One of the sets (B, n, K)."""
    return map_state(lambda part: part[:, index], sets)


def shift_sets(sets: Tensor, new: Tensor) -> Tensor:
    """The sets (B, R, K) without the first, and with a new last one."""
    return torch.cat([sets[:, 1:], new], 1)
