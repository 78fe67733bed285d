"""What every decoder returns, and how it is packed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from asrkit.decoders.nests import nest_map
from asrkit.shapes import dims, expect


class Step(NamedTuple):
    """At most one label for each utterance of a batch, all (B,): what one turn of a decoder's loop
    wrote.
    """

    labels: Tensor  # int64
    frames: Tensor  # int64, the frame that the label is on
    durations: Tensor  # int64, frames that TDT jumps after it; 0 for RNN-T
    emitted: Tensor  # bool, whether there was a label; where it is false the rest means nothing
    confidence: Tensor | None = None  # float32


@dataclass(frozen=True, kw_only=True)
class Hypotheses:
    """Labels of B utterances, padded with -1 to the N of the longest; ordinary tensors, fit for a
    loss too.
    """

    labels: Tensor  # (B, N) int64
    lengths: Tensor  # (B,) int64, labels of each utterance
    frames: Tensor  # (B, N) int64, the frame that each label was emitted on
    # (B, N) int64, frames that TDT jumps after the label (0 for RNN-T); for CTC the frames of its
    # run
    durations: Tensor
    # (B,) log-probability in nats of the path that was taken, blanks and durations included
    scores: Tensor
    impl: str  # the strategy, and how it ran
    confidence: Tensor | None = None  # (B, N) float32 in 0..1, padded with -1, if it was asked for
    carry: Any = (
        None  # transducers: what decodes the frames that follow, for `carry=` of the next call
    )
    alternatives: tuple["Hypotheses", ...] = ()  # beam search: second best, third best and so on

    def tokens(self) -> list[list[int]]:
        """The labels as one list an utterance, without padding."""
        return [
            row[:length]
            for row, length in zip(self.labels.tolist(), self.lengths.tolist(), strict=True)
        ]

    def parts(self) -> list[Tensor]:
        """The tensors that two decoders have to agree on."""
        found = [self.labels, self.lengths, self.frames, self.durations, self.scores]
        return found if self.confidence is None else [*found, self.confidence]

    @classmethod
    @torch.inference_mode(False)
    def from_steps(
        cls, steps: Sequence[Step], scores: Tensor, impl: str, carry: Any = None
    ) -> Self:
        """What a loop over labels or frames emitted, in order; there may be no steps. Its one wait
        for a GPU is for N.
        """
        nothing = scores.new_zeros((len(scores), 0), dtype=torch.int64)
        every = Step(nothing, nothing, nothing, nothing.bool())
        if steps:
            every = nest_map(lambda *parts: torch.stack(parts, 1), *steps)
        lengths = every.emitted.sum(1)
        N = int(lengths.max())
        place = torch.where(
            every.emitted, every.emitted.cumsum(1) - 1, N
        )  # what is dropped lands in a column of its own
        kept = nest_map(
            lambda part: part.new_full((len(part), N + 1), -1).scatter_(1, place, part)[:, :N],
            every,
        )
        return cls(
            labels=kept.labels,
            frames=kept.frames,
            durations=kept.durations,
            confidence=kept.confidence,
            lengths=lengths,
            scores=scores.clone(),
            impl=impl,
            carry=carry,
        )

    @classmethod
    @torch.inference_mode(False)
    def from_lists(
        cls, rows: Sequence[Sequence[tuple]], scores: Sequence[Tensor], impl: str, carry: Any = None
    ) -> Self:
        """From a list of (label, frame, duration[, confidence]) an utterance, the sequential
        decoders' way.
        """
        device, N = scores[0].device, max(map(len, rows))
        columns = [
            [[item[i] for item in row] + [-1] * (N - len(row)) for row in rows]
            for i in range(_width(rows))
        ]
        whole = [
            torch.tensor(column, dtype=torch.int64, device=device).view(len(rows), N)
            for column in columns[:3]
        ]
        sure = [
            torch.tensor(column, dtype=torch.float32, device=device).view(len(rows), N)
            for column in columns[3:]
        ]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        return cls(
            labels=whole[0],
            frames=whole[1],
            durations=whole[2],
            confidence=sure[0] if sure else None,
            lengths=lengths,
            scores=torch.stack([*scores]).clone(),
            impl=impl,
            carry=carry,
        )


def _width(rows: Sequence[Sequence[tuple]]) -> int:
    return max((len(item) for row in rows for item in row), default=3)


def _in_memory(tensor: Tensor) -> bool:
    """Whether `tensor` is plain numbers: not sparse, nested, on "meta" or of torch.func."""
    try:
        return (
            tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_meta)
            and tensor.data_ptr() >= 0
        )
    except RuntimeError:
        return False


def check(scores: Tensor, lengths: Tensor, letters: str, argument: str) -> int:
    """Frames of the longest utterance, after the checks every decoder makes: ranks, one device, 0
    <= lengths <= T.
    """
    plain = "a dense tensor with numbers in it"
    expect(not isinstance(scores, Tensor) or _in_memory(scores), argument, plain, "another kind")
    B, T = dims(scores, letters, argument)[:2]
    dims(lengths, "B", "lengths", B=B)
    expect(B > 0, argument, "at least one utterance", tuple(scores.shape))
    expect(
        scores.is_floating_point() and scores.itemsize > 1,
        argument,
        "a float dtype of 16 bits or more",
        scores.dtype,
    )
    expect(lengths.dtype in (torch.int32, torch.int64), "lengths", "int32 or int64", lengths.dtype)
    expect(
        lengths.device == scores.device, "lengths", f"a tensor on {scores.device}", lengths.device
    )
    expect(_in_memory(lengths), "lengths", plain, "another kind")
    low, high = torch.stack(lengths.aminmax()).tolist()
    expect(0 <= low <= high <= T, "lengths", f"0 to T={T} frames", f"{low} to {high}")
    return high
