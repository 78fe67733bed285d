"""One look at the joint: which token is best, how far it moves, how likely it is. One rule for every strategy and device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.nests import leaves, nest_map
from asrkit.shapes import expect

Confidence = Literal["none", "max_prob", "entropy"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the door passes on to a strategy."""

    max_symbols: int = 10
    window: int = 8
    graphs: str = "off"


def check_rules(model: Any, max_symbols: int) -> None:
    """ValueError unless blank, durations and `max_symbols` are such that every path comes to an end."""
    expect(isinstance(max_symbols, int) and max_symbols >= 1, "max_symbols", "at least 1", max_symbols)
    expect(model.blank >= 0, "model.blank", "an index from 0", model.blank, "Count it from the front: V - 1, not -1.")
    durations = getattr(model, "durations", ())
    whole = all(isinstance(duration, int) and duration >= 0 for duration in durations)
    expect(whole, "model.durations", "whole numbers from 0", durations)


class Carry(NamedTuple):
    """Where B utterances stand when their frames so far are used up; hand it on to decode the frames that follow."""

    predicted: Tensor  # (B, P) of the labels so far
    state: Any  # of the predictor
    ahead: Tensor  # (B,) int64, frames still to come that a duration has jumped over already
    frames: Tensor  # (B,) int64, frames that lie behind, so that labels are placed from the start of the utterance

    def select(self, rows: Tensor | slice) -> "Carry":
        """Some of the utterances, in the order that `rows` indexes them."""
        return nest_map(lambda tensor: tensor[rows], self)

    @staticmethod
    def join(carries: Sequence["Carry"]) -> "Carry":
        """Utterances of several batches as one, those of the first batch first."""
        expect(len(carries) > 0, "carries", "at least one", "none")
        return nest_map(lambda *tensors: torch.cat(tensors), *carries)

    def check(self, encoded: Tensor) -> None:
        """ValueError unless the carry is of as many utterances as encoded (B, T, E), and on the same device."""
        found, B, device = leaves(self), len(encoded), str(encoded.device)
        sizes = sorted({str(len(tensor)) if tensor.dim() else "none" for tensor in found})
        expect(sizes == [str(B)], "carry", f"B={B} utterances", ", ".join(sizes), "Regroup it with select and join.")
        devices = sorted({str(tensor.device) for tensor in found})
        expect(devices == [device], "carry", f"tensors on {device}", ", ".join(devices))

    def after(self, time: Tensor, lengths: Tensor, predicted: Tensor, state: Any) -> "Carry":
        """The same utterances once their clocks (B,) have passed `lengths` more frames."""
        return Carry(predicted, state, time - lengths, self.frames + lengths)


class Reading(NamedTuple):
    """The best token of each joint, all (...,)."""

    token: Tensor  # int64
    jump: Tensor  # int64, frames to move: of RNN-T 1 for blank and 0 for a label; of TDT as predicted, blank at least 1
    score: Tensor  # float32 log-probability in nats of token, and of TDT's duration
    confidence: Tensor | None  # float32 in 0..1


class Reader:
    """Calls `join` of a model, once a look. `reach` is the longest jump."""

    def __init__(self, model: Any, confidence: Confidence = "none", device: torch.device | None = None) -> None:
        self.model, self.confidence, self.blank = model, confidence, model.blank
        self.durations = tuple(getattr(model, "durations", ()))
        self.reach = max(1, *self.durations) if self.durations else 1
        self.table = torch.tensor(self.durations, device=device) if self.durations else None

    def __call__(self, encoded: Tensor, predicted: Tensor) -> Reading:
        """The reading of frames (..., E) with predictions (..., P) whose leading dimensions broadcast."""
        logits = self.model.join(encoded, predicted)
        wide = torch.promote_types(logits.dtype, torch.float32)
        V = logits.shape[-1] - len(self.durations)
        logp = logits[..., :V].log_softmax(-1, dtype=wide)  # a softmax for tokens and one for durations, always
        score, token = logp.max(-1)
        blank = (token == self.blank).long()
        if self.table is None:
            return Reading(token, blank, score.float(), self.certainty(logp, score))
        best, which = logits[..., V:].log_softmax(-1, dtype=wide).max(-1)
        jump = torch.maximum(self.table[which], blank)
        return Reading(token, jump, (score + best).float(), self.certainty(logp, score))

    def certainty(self, logp: Tensor, score: Tensor) -> Tensor | None:
        """How sure the tokens' softmax is: the best one's probability, or 1 - entropy / ln V; None unless asked for."""
        if self.confidence == "none":
            return None
        if self.confidence == "max_prob":
            return score.exp().float()
        entropy = torch.special.entr(logp.exp()).sum(-1)
        return (1 - entropy / math.log(logp.shape[-1])).clamp(0, 1).float()

    def start(self, encoded: Tensor) -> Carry:
        """The carry of the utterances of encoded (B, T, E) before anything of them was heard."""
        blank = torch.full((len(encoded),), self.blank, dtype=torch.int64, device=encoded.device)
        predicted, state = self.model.predict(blank, None)
        batched = {tensor.shape[:1] for tensor in leaves((predicted, state))} == {blank.shape}
        expect(batched, "model.predict", f"tensors with B={len(blank)} as first dimension", "another", "Transpose its state.")
        return Carry(predicted, state, torch.zeros_like(blank), torch.zeros_like(blank))
