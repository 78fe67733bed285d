"""What the beam searches share: shallow fusion, checks, hashes of prefixes, selection."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asrkit.shapes import MAX_COUNT, MAX_WEIGHT, expect, is_finite, whole


class LanguageModel(Protocol):
    """What shallow fusion asks of a language model; `NGram` and `WordNGram` are two.

    Its states are nested tuples, lists and dicts of tensors, batch first.
    """

    def start(self, B: int) -> Any:
        """States of B empty sentences."""

    def scores(self, states: Any) -> Tensor:
        """Log-probability in nats of every next token, (B, V); the blank's entry is not used."""

    def advance(self, states: Any, tokens: Tensor) -> Any:
        """States after one more token (B,) each."""

    def final(self, states: Any) -> Tensor:
        """Log-probability in nats that the sentence ends here, (B,)."""


class Fusion(NamedTuple):
    """What shallow fusion adds to the model's scores."""

    lm: LanguageModel | None
    weight: float
    bonus: float

    def lm_scores(self, states: Any) -> Tensor | None:
        """Weighted log-probability of each next label, (B, V), or None."""
        if self.lm is None:
            return None
        return self.weight * self.lm.scores(states)

    def advance(self, states: Any, labels: Tensor) -> Any:
        """States of the language model after `labels`, or None."""
        if self.lm is None:
            return None
        return self.lm.advance(states, labels)


def check_width(width: int, nbest: int) -> None:
    """ValueError unless `width` hypotheses can be kept and `nbest` of them returned."""
    expect(whole(width, 1, MAX_COUNT), "width", f"1 to {MAX_COUNT} hypotheses", repr(width))
    expect(whole(nbest, 1, width), "nbest", f"1 to width={width} hypotheses", repr(nbest))


def check_weights(**weights: float) -> None:
    """ValueError unless each of the named weights is a number within `MAX_WEIGHT`."""
    wanted = f"a number from -{MAX_WEIGHT:,.0f} to {MAX_WEIGHT:,.0f}"
    for name, value in weights.items():
        inside = is_finite(value) and abs(value) <= MAX_WEIGHT
        expect(inside, name, wanted, f"{value!r:.40}")


def check_lm(lm: object) -> None:
    """ValueError unless `lm` has the methods of a `LanguageModel`, or is None."""
    methods = ("start", "scores", "advance", "final")
    fits = lm is None or all(callable(getattr(lm, method, None)) for method in methods)
    remedy = "Read a file by NGram.read or WordNGram.read."
    expect(fits, "lm", "a language model, or None", type(lm).__name__, remedy)


def check_lm_scores(scores: Tensor, V: int) -> None:
    """ValueError unless the language model's scores (B, V) are of V tokens."""
    size = scores.shape[-1]
    expect(size == V, "lm", f"scores of V={V} tokens", size, "Blank has a place among them.")


MIX = -7046029254386353131  # 2^64 / golden ratio, odd, as int64: multiplying by it loses nothing
LOW_35 = (1 << 35) - 1


def longer_key(key: Tensor, label: Tensor) -> Tensor:
    """Hashes of prefixes with one more label, of the hashes of the prefixes; int64, any shape.

    64 bits, so a million comparisons of different prefixes go wrong once in 10^13 times.
    """
    mixed = (key ^ (label + 1)) * MIX
    return mixed ^ ((mixed >> 29) & LOW_35)


def first_best(scores: Tensor, k: int) -> Tensor:
    """Places (..., k) of the k best of (..., n), in ascending order; of equals the first ones.

    `topk` alone says nothing about equals.
    """
    n = scores.shape[-1]
    least = scores.topk(k).values[..., -1:]
    above = scores > least
    equal = scores == least
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    places = torch.arange(n, device=scores.device)
    return torch.where(chosen, places, n).topk(k, largest=False).values


def best_first(scores: Tensor) -> Tensor:
    """The order of (..., n) scores, best first; equals stay in theirs."""
    return scores.sort(dim=-1, descending=True, stable=True).indices
