"""One look at the joint: which token is best, how far it moves, how likely it is. One rule for
every strategy and device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.nests import leaves, nest_map
from asrkit.shapes import MOST, expect, whole

Confidence = Literal["none", "max_prob", "entropy"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the door passes on to a strategy."""

    max_symbols: int = 10
    window: int = 8
    graphs: str = "off"
    turn: str = "auto"


def check_rules(model: Any, max_symbols: int) -> None:
    """ValueError unless blank, durations and `max_symbols` are such that every path comes to an
    end, and in bounded memory.
    """
    missing = [name for name in ("blank", "predict", "join") if not hasattr(model, name)]
    expect(
        not missing,
        "model",
        "blank, predict and join",
        f"{type(model).__name__} without {', '.join(missing)}",
    )
    expect(
        whole(max_symbols, 1, MOST),
        "max_symbols",
        f"1 to {MOST} labels on a frame",
        repr(max_symbols),
    )
    expect(
        whole(model.blank, 0),
        "model.blank",
        "an index from 0",
        repr(model.blank),
        "Count it from the front: V - 1, not -1.",
    )
    durations = getattr(model, "durations", ())
    frames = isinstance(durations, Sequence) and all(
        whole(duration, 0, MOST) for duration in durations
    )
    expect(
        frames, "model.durations", f"a sequence of whole numbers from 0 to {MOST}", repr(durations)
    )


class Carry(NamedTuple):
    """Where B utterances stand when their frames so far are used up; hand it on to decode the
    frames that follow.
    """

    predicted: Tensor  # (B, P) of the labels so far
    state: Any  # of the predictor
    ahead: Tensor  # (B,) int64, frames still to come that a duration has jumped over already
    # (B,) int64, frames that lie behind, so that labels are placed from the start of the utterance
    frames: Tensor

    def select(self, rows: Tensor | slice) -> "Carry":
        """Some of the utterances, in the order that `rows` indexes them."""
        return nest_map(lambda tensor: tensor[rows], self)

    @staticmethod
    def join(carries: Sequence["Carry"]) -> "Carry":
        """Utterances of several batches as one, those of the first batch first."""
        expect(len(carries) > 0, "carries", "at least one", "none")

        def chain(*tensors: Tensor) -> Tensor:
            kinds = sorted({f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors})
            expect(len(kinds) == 1, "carries", "states of one model", " beside ".join(kinds))
            return torch.cat(tensors)

        return nest_map(chain, *carries)

    def check(self, encoded: Tensor) -> None:
        """ValueError unless the carry is of as many utterances as encoded (B, T, E), and on the
        same device.
        """
        found, B, device = leaves(self), len(encoded), str(encoded.device)
        sizes = sorted({str(len(tensor)) if tensor.dim() else "none" for tensor in found})
        expect(
            sizes == [str(B)],
            "carry",
            f"B={B} utterances",
            ", ".join(sizes),
            "Regroup it with select and join.",
        )
        columns = all(
            isinstance(part, Tensor) and part.dtype == torch.int64
            for part in (self.ahead, self.frames)
        )
        own = (
            columns
            and isinstance(self.predicted, Tensor)
            and [self.predicted.dim(), self.ahead.dim(), self.frames.dim()]
        )
        expect(
            own == [2, 1, 1],
            "carry",
            "predicted (B, P), and ahead and frames (B,) int64",
            "others",
            "Pass hypotheses.carry.",
        )
        devices = sorted({str(tensor.device) for tensor in found})
        expect(devices == [device], "carry", f"tensors on {device}", ", ".join(devices))

    def after(self, time: Tensor, lengths: Tensor, predicted: Tensor, state: Any) -> "Carry":
        """The same utterances once their clocks (B,) have passed `lengths` more frames."""
        return Carry(predicted, state, time - lengths, self.frames + lengths)


class Reading(NamedTuple):
    """The best token of each joint, all (...,)."""

    token: Tensor  # int64
    # int64, frames to move: of RNN-T 1 for blank and 0 for a label; of TDT as predicted, blank at
    # least 1
    jump: Tensor
    score: Tensor  # float32 log-probability in nats of token, and of TDT's duration
    confidence: Tensor | None  # float32 in 0..1


class Reader:
    """Calls `join` of a model, once a look. `reach` is the longest jump."""

    def __init__(
        self, model: Any, confidence: Confidence = "none", device: torch.device | None = None
    ) -> None:
        self.model, self.confidence, self.blank = model, confidence, model.blank
        self.durations = tuple(getattr(model, "durations", ()))
        self.reach = max(1, *self.durations) if self.durations else 1
        self.table = torch.tensor(self.durations, device=device) if self.durations else None

    def __call__(self, encoded: Tensor, predicted: Tensor) -> Reading:
        """The reading of frames (..., E) with predictions (..., P) whose leading dimensions
        broadcast.
        """
        logits = self.model.join(encoded, predicted)
        V = vocabulary(logits, encoded, self.blank, self.durations)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp = logits[..., :V].log_softmax(
            -1, dtype=wide
        )  # a softmax for tokens and one for durations, always
        score, token = logp.max(-1)
        blank = (token == self.blank).long()
        if self.table is None:
            return Reading(token, blank, score.float(), self.certainty(logp, score))
        best, which = logits[..., V:].log_softmax(-1, dtype=wide).max(-1)
        jump = torch.maximum(self.table[which], blank)
        return Reading(token, jump, (score + best).float(), self.certainty(logp, score))

    def certainty(self, logp: Tensor, score: Tensor) -> Tensor | None:
        """How sure the tokens' softmax is: the best one's probability, or 1 - entropy / ln V; None
        unless asked for.
        """
        if self.confidence == "none":
            return None
        if self.confidence == "max_prob":
            return score.exp().float()
        entropy = torch.special.entr(logp.exp()).sum(-1)
        return (1 - entropy / math.log(logp.shape[-1])).clamp(0, 1).float()

    def start(self, encoded: Tensor) -> Carry:
        """The carry of the utterances of encoded (B, T, E) before anything of them was heard."""
        blank = torch.full((len(encoded),), self.blank, dtype=torch.int64, device=encoded.device)
        predicted, state = first_prediction(self.model, blank)
        return Carry(predicted, state, torch.zeros_like(blank), torch.zeros_like(blank))


def first_prediction(model: Any, blank: Tensor) -> tuple[Tensor, Any]:
    """(predicted, state) before the first label of len(blank) utterances; ValueError for what is no
    such pair.
    """
    found = model.predict(blank, None)
    pair = (
        isinstance(found, tuple | list)
        and len(found) == 2
        and isinstance(found[0], Tensor)
        and found[0].dim() == 2
    )
    expect(pair, "model.predict", "the pair predicted (B, P), state", _told(found))
    batched = {tensor.shape[:1] for tensor in leaves(found)} == {blank.shape}
    expect(
        batched,
        "model.predict",
        f"tensors with B={len(blank)} as first dimension",
        "another",
        "Transpose its state.",
    )
    return found[0], found[1]


def vocabulary(logits: Any, encoded: Tensor, blank: int, durations: Sequence[int]) -> int:
    """V, of what `join` said of frames (..., E); ValueError for logits that are not (..., V +
    durations) with V > blank.
    """
    fits = (
        isinstance(logits, Tensor)
        and logits.is_floating_point()
        and logits.shape[:-1] == encoded.shape[:-1]
    )
    if not fits or logits.shape[-1] <= blank + len(durations):
        sizes = ", ".join(map(str, encoded.shape[:-1]))
        expect(
            False,
            "model.join",
            f"float logits ({sizes}, more than {blank + len(durations)})",
            _told(logits),
        )
    return logits.shape[-1] - len(durations)


def _told(found: Any) -> str:
    """Shape and dtype of a tensor, or what it is; of a tuple, of its parts."""
    if isinstance(found, tuple | list):
        return f"{type(found).__name__} of {', '.join(map(_told, found))}"
    return (
        f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
    )
