"""What every decoder returns, and how it is packed."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asrkit.shapes import dims, expect


@dataclass(frozen=True, kw_only=True)
class Hypotheses:
    """Labels of B utterances, padded with -1 to the N of the longest; ordinary tensors, fit for a loss too."""

    labels: Tensor  # (B, N) int64
    lengths: Tensor  # (B,) int64, labels of each utterance
    frames: Tensor  # (B, N) int64, the frame that each label was emitted on
    scores: Tensor  # (B,) log-probability in nats of the path that was taken, blanks included
    impl: str

    def tokens(self) -> list[list[int]]:
        """The labels as one list an utterance, without padding."""
        return [row[:length] for row, length in zip(self.labels.tolist(), self.lengths.tolist(), strict=True)]

    @classmethod
    @torch.inference_mode(False)
    def pack(cls, labels: Tensor, frames: Tensor, keep: Tensor, scores: Tensor, impl: str) -> Self:
        """From what each step chose (B, steps): keeps where `keep`, in order. Its one wait for a GPU is for N."""
        lengths = keep.sum(1)
        N = int(lengths.max())
        place = torch.where(keep, keep.cumsum(1) - 1, N)  # what is dropped lands in a column of its own
        packed = [part.new_full((len(keep), N + 1), -1).scatter_(1, place, part)[:, :N] for part in (labels, frames)]
        return cls(labels=packed[0], frames=packed[1], lengths=lengths, scores=scores.clone(), impl=impl)

    @classmethod
    @torch.inference_mode(False)
    def from_lists(cls, labels: list[list[int]], frames: list[list[int]], scores: list[Tensor], impl: str) -> Self:
        """From one list an utterance, the sequential decoders' way."""
        device = scores[0].device
        rows = [[torch.tensor(row, dtype=torch.int64, device=device) for row in part] for part in (labels, frames)]
        padded = [pad_sequence(part, batch_first=True, padding_value=-1) for part in rows]
        lengths = torch.tensor([len(row) for row in labels], device=device)
        return cls(labels=padded[0], frames=padded[1], lengths=lengths, scores=torch.stack(scores).clone(), impl=impl)


def check(scores: Tensor, lengths: Tensor, letters: str, argument: str) -> int:
    """Frames of the longest utterance, after the checks every decoder makes: ranks, one device, 0 <= lengths <= T."""
    B, T = dims(scores, letters, argument)[:2]
    dims(lengths, "B", "lengths", B=B)
    expect(B > 0, argument, "at least one utterance", tuple(scores.shape))
    expect(lengths.dtype in (torch.int32, torch.int64), "lengths", "int32 or int64", lengths.dtype)
    expect(lengths.device == scores.device, "lengths", f"a tensor on {scores.device}", lengths.device)
    low, high = torch.stack(lengths.aminmax()).tolist()
    expect(0 <= low <= high <= T, "lengths", f"0 to T={T} frames", f"{low} to {high}")
    return high
