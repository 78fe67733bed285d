"""What beam searches and language models share: the protocol of fusion, checks, and ties."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from asrkit.shapes import MAX_COUNT, MAX_WEIGHT, expect, is_finite, whole


@runtime_checkable
class LanguageModel(Protocol):
    """What shallow fusion needs of a language model, for example `NGram` and `WordNGram`.

    States are nested tuples, lists and dicts of tensors, batch first.
    """

    def start(self, B: int) -> Any:
        """States of B empty sentences."""

    def scores(self, states: Any) -> Tensor:
        """Log-probability in nats of every next token, (B, V); the blank's entry is not used."""

    def advance(self, states: Any, tokens: Tensor) -> Any:
        """States after one more token (B,) each."""

    def final(self, states: Any) -> Tensor:
        """Log-probability in nats that the sentence ends here, (B,)."""


def check_width(width: int) -> None:
    """Raise ValueError unless `width` is a valid number of hypotheses."""
    expect(whole(width, 1, MAX_COUNT), "width", f"1 to {MAX_COUNT} hypotheses", repr(width))


def check_weights(**weights: float) -> None:
    """Raise ValueError unless each of the named weights is a number within `MAX_WEIGHT`."""
    wanted = f"a number from -{MAX_WEIGHT:,.0f} to {MAX_WEIGHT:,.0f}"
    for name, value in weights.items():
        inside = is_finite(value) and abs(value) <= MAX_WEIGHT
        expect(inside, name, wanted, f"{value!r:.40}")


def first_best(scores: Tensor, k: int) -> Tensor:
    """Places (..., k) of the k best of (..., n), in ascending order; the first of equal scores win.

    `topk` alone does not define an order of equal scores.
    """
    n = scores.shape[-1]
    least = scores.topk(k).values[..., -1:]
    above = scores > least
    equal = scores == least
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    places = torch.arange(n, device=scores.device)
    return torch.where(chosen, places, n).topk(k, largest=False).values
