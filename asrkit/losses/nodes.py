"""Where the nodes of a batch of lattices lie in memory, and what passes between a loss's steps.

Implementations work on a flat list of N = sum of T (U + 1) valid nodes instead of (B, T, U1)
tensors. Node (t, u) of utterance b

- has its V logits at element `first_logit + t frame_step + u label_step` of the logits' storage,
- has its own numbers (log-normaliser, arc log-probabilities, arc posteriors) at index
  `first_node + t (U + 1) + u` of vectors of length N.

So padding costs nothing, and packed logits need no second kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from asrkit.runtime import to_device

# Columns of the table of nodes, one row an utterance.
FRAMES = 0  # T, valid frames
LABELS = 1  # U, valid labels
FIRST_NODE = 2  # index of node (0, 0) among all N nodes
FIRST_LOGIT = 3  # element of the logits' storage at which node (0, 0) starts
FRAME_STEP = 4  # elements from one frame to the next
LABEL_STEP = 5  # elements from one lattice row to the next
ROW_FRAMES = 6  # frames in memory, padding included
ROW_NODES = 7  # lattice rows in memory, padding included


@dataclass(frozen=True)
class Nodes:
    """Location of every lattice node: `table` (B, 8), int64, on the host; see the columns above."""

    table: Tensor

    @classmethod
    def padded(cls, logits: Tensor, lengths: Tensor) -> "Nodes":
        """Nodes of `logits` (B, T, U1, V) of any strides; `lengths` (B, 2): frames and labels."""
        B, T, U1, _ = logits.shape
        batch_step, frame_step, label_step, _ = logits.stride()
        # "cpu" is named because torch's default device may be another
        steps = torch.tensor([frame_step, label_step, T, U1], device="cpu").expand(B, -1)
        return cls._of(lengths, torch.arange(B, device="cpu") * batch_step, steps)

    @classmethod
    def packed(cls, lengths: Tensor, V: int) -> "Nodes":
        """Nodes of packed logits (N, V), ordered by utterance, then frame; `lengths` is (B, 2)."""
        T = lengths[:, 0]
        U1 = lengths[:, 1] + 1
        steps = torch.stack((U1 * V, torch.full_like(T, V), T, U1), 1)
        return cls._of(lengths, (T * U1).cumsum(0).sub(T * U1) * V, steps)

    @classmethod
    def _of(cls, lengths: Tensor, first_logit: Tensor, steps: Tensor) -> "Nodes":
        size = lengths[:, 0] * (lengths[:, 1] + 1)
        first_node = size.cumsum(0) - size
        columns = (lengths, first_node[:, None], first_logit[:, None], steps)
        return cls(torch.cat(columns, 1).contiguous())

    @cached_property
    def count(self) -> int:
        """N, the number of valid nodes in the batch."""
        return int(self.sizes.sum())

    @cached_property
    def sizes(self) -> Tensor:
        """T (U + 1), the valid nodes of each utterance: int64 (B,), on the host."""
        return self.table[:, FRAMES] * (self.table[:, LABELS] + 1)

    @cached_property
    def padded_sizes(self) -> Tensor:
        """The nodes of each utterance in memory, padding included: int64 (B,), on the host."""
        return self.table[:, ROW_FRAMES] * self.table[:, ROW_NODES]

    @cached_property
    def rows(self) -> np.ndarray:
        """Utterance and frame of every frame in memory, padding included: int32 (rows, 2)."""
        counts = self.table[:, ROW_FRAMES].numpy()
        first = np.repeat(counts.cumsum() - counts, counts)
        utterance = np.repeat(np.arange(len(counts)), counts)
        frame = np.arange(len(first)) - first
        return np.stack((utterance, frame), 1).astype(np.int32)

    def strided_like(self, other: Tensor) -> "Nodes":
        """The same nodes in `other`, a tensor of the logits' shape with strides of its own."""
        if other.dim() == 4:
            return Nodes.padded(other, self.table[:, :2])
        return self

    def grid(self, logits: Tensor, b: int) -> Tensor:
        """Logits of utterance b with their padding, (T, U1, V), as a view."""
        row = self.table[b].tolist()
        size = (row[ROW_FRAMES], row[ROW_NODES], logits.shape[-1])
        stride = (row[FRAME_STEP], row[LABEL_STEP], logits.stride(-1))
        return logits.detach().as_strided(size, stride, logits.storage_offset() + row[FIRST_LOGIT])

    def on(self, device: torch.device) -> Tensor:
        """The table on `device`, copied there once; no CPU waits for the copy."""
        if device.type == "cpu":
            return self.table
        if self._copies.get(device) is None:
            self._copies[device] = to_device(self.table, device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}

    def slices(self, b: int) -> tuple[int, int, slice]:
        """Of utterance b: frames T, lattice rows U + 1, and its slice of the N nodes."""
        T, U, start = self.table[b, : FIRST_NODE + 1].tolist()
        return T, U + 1, slice(start, start + T * (U + 1))


def upload(many: Sequence[Nodes], device: torch.device) -> None:
    """Copy the tables of all these nodes to `device` at once."""
    tables = [nodes.table for nodes in many]
    copied = to_device(torch.cat(tables), device).split([len(table) for table in tables])
    for nodes, table in zip(many, copied, strict=True):
        nodes._copies[device] = table


@dataclass(frozen=True, kw_only=True)
class LatticeOptions:
    """Checked options of a loss. `blank` is not negative; `durations` is empty for RNN-T."""

    blank: int
    clamp: float = -1.0
    fused_log_softmax: bool = True
    fastemit_lambda: float = 0.0
    overwrite_logits: bool = False
    durations: tuple[int, ...] = ()
    sigma: float = 0.0


@dataclass(frozen=True)
class ArcLogProbs:
    """Log-probabilities of the arcs that leave every node, in nats.

    The dtype is float32, or float64 for float64 logits.

    Attributes:
        log_z: (N,) log-normaliser of the token logits; 0 where they are log-probabilities already.
        blank_logp: (N,) of the blank arc.
        label_logp: (N,) of the arc of the next label, -inf where no label is left.
        duration_logp: (N, n) of the n durations (TDT), None for RNN-T.
    """

    log_z: Tensor
    blank_logp: Tensor
    label_logp: Tensor
    duration_logp: Tensor | None = None

    def lowered(self, sigma: float) -> "ArcLogProbs":
        """The same with token log-probabilities `sigma` nats lower, as TDT trains."""
        if not sigma:
            return self
        blank_logp = self.blank_logp - sigma
        return replace(self, blank_logp=blank_logp, label_logp=self.label_logp - sigma)


@dataclass(frozen=True)
class ArcPosteriors:
    """Log-likelihood of every utterance, and the posterior probability of every arc.

    The posterior of an arc is the share of the likelihood whose paths take it. Posteriors have the
    dtype of the arc log-probabilities and are None where no gradient was asked for. Label arcs are
    scaled by 1 + lambda (FastEmit).

    Attributes:
        log_likelihood: (B,), float64, in nats.
        blank_posterior: (N,) of the blank arc of each node.
        label_posterior: (N,) of the label arc of each node.
        duration_posterior: (N, n) of blank and label arcs of each duration together (TDT).
    """

    log_likelihood: Tensor
    blank_posterior: Tensor | None = None
    label_posterior: Tensor | None = None
    duration_posterior: Tensor | None = None
