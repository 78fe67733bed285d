"""Where the nodes of a batch of lattices lie: in logits that are padded or packed, and packed among
themselves.

Every implementation works on nodes, not on (B, T, U1) tensors: node (t, u) of utterance b has its V
logits at element `first_logit + t frame_step + u label_step` of the logits' storage, and its own
numbers (log-normaliser, arcs, shares) at place `first_node + t (U + 1) + u` of vectors of N = sum
of T (U + 1). So padding costs nothing and packed logits need no second kernel.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

FRAMES, LABELS, FIRST_NODE, FIRST_LOGIT, FRAME_STEP, LABEL_STEP, ROW_FRAMES, ROW_NODES = range(
    8
)  # columns of the table


@dataclass(frozen=True)
class Nodes:
    """The map: `table` (B, 8), int64, on the host; columns as named above. ROW_FRAMES x ROW_NODES
    is what padding spans.
    """

    table: Tensor

    @classmethod
    def padded(cls, logits: Tensor, lengths: Tensor) -> "Nodes":
        """Map of logits (B, T, U1, V), any strides; `lengths` (B, 2): frames and labels of each
        utterance.
        """
        B, T, U1, _ = logits.shape
        steps = torch.tensor([*logits.stride()[1:3], T, U1], device="cpu").expand(
            B, -1
        )  # whatever torch's default device is
        return cls._of(lengths, torch.arange(B, device="cpu") * logits.stride(0), steps)

    @classmethod
    def packed(cls, lengths: Tensor, V: int) -> "Nodes":
        """Map of packed logits (N, V), utterance after utterance, frame after frame."""
        T, U1 = lengths[:, 0], lengths[:, 1] + 1
        steps = torch.stack((U1 * V, torch.full_like(T, V), T, U1), 1)
        return cls._of(lengths, (T * U1).cumsum(0).sub(T * U1) * V, steps)

    @classmethod
    def _of(cls, lengths: Tensor, first_logit: Tensor, steps: Tensor) -> "Nodes":
        size = lengths[:, 0] * (lengths[:, 1] + 1)
        return cls(
            torch.cat(
                (lengths, (size.cumsum(0) - size)[:, None], first_logit[:, None], steps), 1
            ).contiguous()
        )

    @cached_property
    def count(self) -> int:
        """N, nodes of the whole batch."""
        return int((self.table[:, FRAMES] * (self.table[:, LABELS] + 1)).sum())

    @cached_property
    def rows(self) -> np.ndarray:
        """(utterance, frame) of every row of the logits, int32 (sum of ROW_FRAMES, 2); frames of
        the padding included.
        """
        counts = self.table[:, ROW_FRAMES].numpy()
        first = np.repeat(counts.cumsum() - counts, counts)
        return np.stack(
            (np.repeat(np.arange(len(counts)), counts), np.arange(len(first)) - first), 1
        ).astype(np.int32)

    def of(self, other: Tensor) -> "Nodes":
        """The map of a tensor of the same shape as the logits, with strides of its own."""
        return Nodes.padded(other, self.table[:, :2]) if other.dim() == 4 else self

    def grid(self, logits: Tensor, b: int) -> Tensor:
        """Logits of utterance b with their padding, (T, U1, V), as a view."""
        row = self.table[b].tolist()
        size, stride = (
            (row[ROW_FRAMES], row[ROW_NODES], logits.shape[-1]),
            (row[FRAME_STEP], row[LABEL_STEP], logits.stride(-1)),
        )
        return logits.detach().as_strided(size, stride, logits.storage_offset() + row[FIRST_LOGIT])

    def on(self, device: torch.device) -> Tensor:
        """The table on a device, copied there once, from pinned memory, so that nobody waits for
        it.
        """
        if device.type == "cpu":
            return self.table
        if self._copies.get(device) is None:
            self._copies[device] = self.table.pin_memory().to(device, non_blocking=True)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}

    def slices(self, b: int) -> tuple[int, int, slice]:
        """Frames, lattice rows and places of the nodes of utterance b."""
        T, U, start = self.table[b, : FIRST_NODE + 1].tolist()
        return T, U + 1, slice(start, start + T * (U + 1))


@dataclass(frozen=True, kw_only=True)
class LatticeOptions:
    """What a loss is asked for, checked; `blank` is not negative. `durations` are TDT's, none for
    RNN-T.
    """

    blank: int
    clamp: float = -1.0
    fused_log_softmax: bool = True
    fastemit_lambda: float = 0.0
    overwrite_logits: bool = False
    durations: tuple[int, ...] = ()
    sigma: float = 0.0


@dataclass(frozen=True)
class ArcLogProbs:
    """Of every node: log-normaliser z, log-probabilities of blank and of the next label, (N,), and
    of durations (N, n).

    In float32, float64 for float64 logits. `label_logp` is -inf where no label is left. Without a softmax
    to form, log_z is 0.
    """

    log_z: Tensor
    blank_logp: Tensor
    label_logp: Tensor
    duration_logp: Tensor | None = None

    def lowered(self, sigma: float) -> "ArcLogProbs":
        """The same with token log-probabilities `sigma` nats lower."""
        return (
            replace(self, blank_logp=self.blank_logp - sigma, label_logp=self.label_logp - sigma)
            if sigma
            else self
        )


@dataclass(frozen=True)
class ArcPosteriors:
    """Log-likelihood of each utterance in nats, float64 (B,), and the share of it that takes each
    arc of each node.

    `blank_posterior` and `label_posterior` are (N,), `duration_posterior` (N, n), in the dtype of the scores, with label
    arcs times 1 + lambda of FastEmit; all are None where no gradient was asked for.
    """

    log_likelihood: Tensor
    blank_posterior: Tensor | None = None
    label_posterior: Tensor | None = None
    duration_posterior: Tensor | None = None
