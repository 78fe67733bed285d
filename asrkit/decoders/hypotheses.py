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
    emitted: Tensor  # bool; the other tensors hold arbitrary values where it is false
    confidence: Tensor | None = None  # float32


class Segment(NamedTuple):
    """A segment of a text with timestamps."""

    labels: int
    end: int  # first frame after it


class Segments(NamedTuple):
    """The complete segments of a text."""

    whole: tuple[Segment, ...]
    cut_off: bool  # whether an incomplete segment follows
    temperature: float  # of sampling; 0 is greedy
    log_prob: float  # nats per token, the end included


@dataclass(frozen=True, kw_only=True)
class Hypotheses:
    """Label sequences of B utterances, padded with -1 to the length N of the longest.

    The tensors are ordinary ones (not inference tensors), so a loss can take them.

    Attributes:
        labels: (B, N) int64.
        lengths: (B,) int64, labels of each utterance.
        frames: (B, N) int64, the frame of each label; -1 if the decoder computes no frames.
        durations: (B, N) int64: frames that TDT jumps after the label, 0 for RNN-T, length of the
            run for CTC.
        scores: (B,) log-probability in nats of the chosen path, blanks and durations included. A
            beam search sums all paths it kept, and adds the terms of fusion.
        impl: The decoding strategy, and how it ran.
        confidence: (B, N) float32 in 0..1, if requested.
        carry: From transducers only: pass it as `carry=` to decode the frames that follow.
        alternatives: From a beam search only: the second best, third best, and so on.
        ended: (B,) bool, from attention decoders only: whether the text ended with eos, rather than
            at the limit or a NaN.
        languages: From a Whisper only: the language of each utterance, given or detected.
        segments: From a Whisper with timestamps only: the segments of each text.
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
    def filter(self, keep: Tensor) -> Self:
        """The hypotheses with only the labels where `keep` (B, N) is true, without gaps."""
        keep = keep & (self.labels != PADDING)
        lengths = keep.sum(1)
        N = int(lengths.max())
        order = keep.int().argsort(dim=1, descending=True, stable=True)[:, :N]
        padding = ~valid_mask(lengths, N)

        def pick(values: Tensor) -> Tensor:
            return values.gather(1, order).masked_fill(padding, PADDING)

        return replace(
            self,
            labels=pick(self.labels),
            frames=pick(self.frames),
            durations=pick(self.durations),
            confidence=None if self.confidence is None else pick(self.confidence),
            lengths=lengths,
        )

    def parts(self) -> list[Tensor]:
        """The tensors that must agree between two decoders of the same batch."""
        parts = [self.labels, self.lengths, self.frames, self.durations, self.scores]
        if self.confidence is not None:
            parts.append(self.confidence)
        return parts

    @classmethod
    @torch.inference_mode(False)
    def from_steps(
        cls, steps: Sequence[Emissions], scores: Tensor, impl: str, carry: Any = None
    ) -> Self:
        """Hypotheses from the steps of a batched decoding loop. Waits once for the GPU, for N.

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
        # steps without a label go to the extra column S, beyond every length
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
        """Hypotheses from columns that are filled from the left, copied to new tensors.

        Args:
            columns: Labels, frames, durations and confidence or None, (B, any); values beyond
                `lengths` are ignored.
            lengths: (B,) int64.
            scores: (B,) log-probabilities in nats.
            impl: The decoding strategy.
            rest: Other fields.
        """
        N = int(lengths.max())
        padding = ~valid_mask(lengths, N)
        labels, frames, durations, confidence = map_state(
            lambda part: part[:, :N].masked_fill(padding, PADDING), columns
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
        """Hypotheses from the Python lists of a sequential decoder.

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
    """The length in frames of the longest utterance. Checks the input of a decoder.

    Args:
        scores: Log-probabilities or encoder frames: a float tensor of at least one utterance.
        lengths: (B,) int32 or int64 on the same device, 0 <= length <= T.
        letters: Dimensions of `scores`, in the letters of `asrkit.shapes.dims`.
        argument: Name of `scores` in error messages.

    Raises:
        ValueError: An argument has the wrong shape, dtype, device or range.
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
    """Raise ValueError unless `model` has the attributes `names`."""
    missing = [name for name in names if not hasattr(model, name)]
    got = f"{type(model).__name__} without {', '.join(missing)}"
    expect(not missing, "model", ", ".join(names), got)
