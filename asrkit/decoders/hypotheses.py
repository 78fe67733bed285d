"""`Hypotheses`, the result type of every decoder, and the checks that every decoder makes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from asrkit.decoders.states import map_state
from asrkit.shapes import dims, expect, valid_mask

PADDING = -1  # in labels, frames, durations and confidence


class Emissions(NamedTuple):
    """What one turn of a decoder's loop emitted: at most one label per utterance, all (B,)."""

    labels: Tensor  # int64
    frames: Tensor  # int64, the frame that the label is on
    durations: Tensor  # int64, frames that TDT jumps after the label; 0 for RNN-T
    emitted: Tensor  # bool; where it is false, the other tensors hold arbitrary values
    confidence: Tensor | None = None  # float32


class Segment(NamedTuple):
    """A segment of a text with timestamps."""

    labels: int
    end: int  # the frame behind it


class Segments(NamedTuple):
    """The whole segments of a text."""

    whole: tuple[Segment, ...]
    cut_off: bool  # whether another one begins behind them, with labels or without
    temperature: float  # at which the text was drawn; 0 for the likeliest one
    log_prob: float  # in nats a token, the end included


@dataclass(frozen=True, kw_only=True)
class Hypotheses:
    """Label sequences of B utterances, padded with -1 to the length N of the longest.

    The tensors are ordinary ones (not inference tensors), so a loss can take them.

    Attributes:
        labels: (B, N) int64.
        lengths: (B,) int64, labels of each utterance.
        frames: (B, N) int64, the frame that each label was emitted on; -1 where a decoder was not
            asked.
        durations: (B, N) int64: frames that TDT jumps after the label, 0 for RNN-T, length of the
            run for CTC.
        scores: (B,) log-probability in nats of the chosen path, blanks and durations included; of a
            beam that of all paths it kept, and the terms of fusion.
        impl: The decoding strategy, and how it was run.
        confidence: (B, N) float32 in 0..1, if it was asked for.
        carry: Of transducers: pass it as `carry=` to decode the frames that follow.
        alternatives: Of a beam search: the second best, third best, and so on.
        ended: (B,) bool, of attention decoders: whether a text came to its end, and not to the
            limit or a NaN.
        languages: Of the utterances, as a Whisper was asked for or found them.
        segments: Of each text, of a Whisper that wrote timestamps.
    """

    labels: Tensor
    lengths: Tensor
    frames: Tensor
    durations: Tensor
    scores: Tensor
    impl: str
    confidence: Tensor | None = None
    carry: Any = None
    alternatives: tuple["Hypotheses", ...] = ()
    ended: Tensor | None = None
    languages: tuple[str, ...] = ()
    segments: tuple[Segments, ...] | None = None

    def tokens(self) -> list[list[int]]:
        """The labels as one list per utterance, without padding."""
        rows = zip(self.labels.tolist(), self.lengths.tolist(), strict=True)
        return [labels[:length] for labels, length in rows]

    @torch.inference_mode(False)
    def only(self, kept: Tensor) -> Self:
        """The hypotheses without the labels that are not `kept` (B, N); padding goes anyway."""
        kept = kept & (self.labels != PADDING)
        lengths = kept.sum(1)
        N = int(lengths.max())
        order = kept.int().argsort(dim=1, descending=True, stable=True)
        order = order[:, :N]
        behind = ~valid_mask(lengths, N)

        def pick(values: Tensor) -> Tensor:
            return values.gather(1, order).masked_fill(behind, PADDING)

        return replace(
            self,
            labels=pick(self.labels),
            frames=pick(self.frames),
            durations=pick(self.durations),
            confidence=None if self.confidence is None else pick(self.confidence),
            lengths=lengths,
        )

    def parts(self) -> list[Tensor]:
        """The tensors in which two decoders of the same batch must agree."""
        parts = [self.labels, self.lengths, self.frames, self.durations, self.scores]
        if self.confidence is not None:
            parts.append(self.confidence)
        return parts

    @classmethod
    @torch.inference_mode(False)
    def from_steps(
        cls, steps: Sequence[Emissions], scores: Tensor, impl: str, carry: Any = None
    ) -> Self:
        """Hypotheses from the steps of a batched decoding loop. Waits for a GPU once, to learn N.

        Args:
            steps: The steps in order; there may be none.
            scores: (B,) log-probabilities in nats.
            impl: The decoding strategy.
            carry: Stored in the result.
        """
        if steps:
            emissions = map_state(lambda *columns: torch.stack(columns, 1), *steps)
        else:
            nothing = scores.new_zeros((len(scores), 0), dtype=torch.int64)
            emissions = Emissions(nothing, nothing, nothing, nothing.bool())
        S = emissions.emitted.shape[1]
        places = emissions.emitted.cumsum(1) - 1
        # steps without a label go to the extra column S, which no length reaches
        column = torch.where(emissions.emitted, places, S)

        def pack(values: Tensor) -> Tensor:
            packed = values.new_zeros(len(values), S + 1)
            return packed.scatter_(1, column, values)

        labels, frames, durations, _, confidence = map_state(pack, emissions)
        return cls.from_columns(
            (labels, frames, durations, confidence),
            emissions.emitted.sum(1),
            scores,
            impl,
            carry=carry,
        )

    @classmethod
    @torch.inference_mode(False)
    def from_columns(
        cls,
        columns: tuple[Tensor, Tensor, Tensor, Tensor | None],
        lengths: Tensor,
        scores: Tensor,
        impl: str,
        **rest: Any,
    ) -> Self:
        """Hypotheses, in tensors of their own, of columns that are filled from the left.

        Args:
            columns: Labels, frames, durations and confidence or None, (B, any); what lies behind
                `lengths` does not count.
            lengths: (B,) int64.
            scores: (B,) log-probabilities in nats.
            impl: The decoding strategy.
            rest: Other fields.
        """
        N = int(lengths.max())
        beyond = ~valid_mask(lengths, N)
        labels, frames, durations, confidence = map_state(
            lambda part: part[:, :N].masked_fill(beyond, PADDING), columns
        )
        return cls(
            labels=labels,
            frames=frames,
            durations=durations,
            confidence=confidence,
            lengths=lengths.clone(),
            scores=scores.clone(),
            impl=impl,
            **rest,
        )

    @classmethod
    @torch.inference_mode(False)
    def from_lists(
        cls,
        rows: Sequence[Sequence[tuple]],
        scores: Sequence[Tensor],
        impl: str,
        carry: Any = None,
    ) -> Self:
        """Hypotheses from Python lists, as the sequential decoders build them.

        Args:
            rows: For each utterance a list of (label, frame, duration) or
                (label, frame, duration, confidence).
            scores: One scalar tensor per utterance, log-probability in nats.
            impl: The decoding strategy.
            carry: Stored in the result.
        """
        device = scores[0].device
        N = max(len(row) for row in rows)

        def column(index: int, dtype: torch.dtype) -> Tensor:
            values = []
            for row in rows:
                padding = [PADDING] * (N - len(row))
                values.append([item[index] for item in row] + padding)
            return torch.tensor(values, dtype=dtype, device=device).view(len(rows), N)

        has_confidence = any(len(item) > 3 for row in rows for item in row)
        return cls(
            labels=column(0, torch.int64),
            frames=column(1, torch.int64),
            durations=column(2, torch.int64),
            confidence=column(3, torch.float32) if has_confidence else None,
            lengths=torch.tensor([len(row) for row in rows], device=device),
            scores=torch.stack([*scores]).clone(),
            impl=impl,
            carry=carry,
        )


def check_batch(scores: Tensor, lengths: Tensor, letters: str, argument: str) -> int:
    """Length in frames of the longest utterance, after the checks that every decoder makes.

    Args:
        scores: Log-probabilities or encoder frames: a float tensor of at least one utterance.
        lengths: (B,) int32 or int64 on the same device, 0 <= length <= T.
        letters: Dimensions of `scores`, as `asrkit.shapes.dims` takes them.
        argument: Name of `scores` in error messages.

    Raises:
        ValueError: Names the argument that does not fit.
    """
    B, T = dims(scores, letters, argument)[:2]
    dims(lengths, "B", "lengths", B=B)
    expect(B > 0, argument, "at least one utterance", tuple(scores.shape))
    wide = scores.is_floating_point() and scores.itemsize > 1
    expect(wide, argument, "a float dtype of 16 bits or more", scores.dtype)
    whole = lengths.dtype in (torch.int32, torch.int64)
    expect(whole, "lengths", "int32 or int64", lengths.dtype)
    same_device = lengths.device == scores.device
    expect(same_device, "lengths", f"a tensor on {scores.device}", lengths.device)
    low, high = torch.stack(lengths.aminmax()).tolist()
    inside = 0 <= low <= high <= T
    expect(inside, "lengths", f"0 to T={T} frames", f"{low} to {high}")
    return high


def check_model(model: Any, *names: str) -> None:
    """ValueError unless `model` has what a decoder asks for."""
    missing = [name for name in names if not hasattr(model, name)]
    got = f"{type(model).__name__} without {', '.join(missing)}"
    expect(not missing, "model", ", ".join(names), got)
