"""Where the nodes of the lattices are in memory, and the records that pass between the steps.

Implementations work on a flat list of N = sum of T (U + 1) valid nodes instead of (B, T, U1)
tensors. Node (t, u) of utterance b has

- its V logits at element `first_logit + t frame_step + u label_step` of the logits' storage,
- its own numbers (log-normaliser, arc log-probabilities, arc posteriors) at index
  `first_node + t (U + 1) + u` of vectors of length N.

So padding costs nothing, and packed logits need no second kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asrkit.devices import to_device

# Columns of the table of nodes; each utterance has one row.
FRAMES = 0  # T, valid frames
LABELS = 1  # U, valid labels
FIRST_NODE = 2  # index of node (0, 0) among all N nodes
FIRST_LOGIT = 3  # element of the logits' storage at which node (0, 0) starts
FRAME_STEP = 4  # elements from one frame to the next
LABEL_STEP = 5  # elements from one lattice row to the next
PADDED_FRAMES = 6  # frames in memory, padding included
PADDED_ROWS = 7  # lattice rows in memory, padding included

# On a CPU, gradients below this become 0: products below float32's normal range take up to a
# hundred times as long.
TINY = 1e-35


@dataclass(frozen=True)
class Nodes:
    """Positions of all lattice nodes: `table` (B, 8), int64, on the host; see the columns above."""

    table: Tensor

    @classmethod
    def padded(cls, logits: Tensor, lengths: Tensor) -> "Nodes":
        """Nodes of contiguous `logits` (B, T, U1, V); `lengths` (B, 2) are frames and labels."""
        _, T, U1, V = logits.shape
        # torch's default device may not be the CPU
        in_memory = torch.tensor([[T, U1]], device="cpu").expand_as(lengths)
        return cls._dense(lengths, in_memory, V)

    @classmethod
    def packed(cls, lengths: Tensor, V: int) -> "Nodes":
        """Nodes of packed logits (N, V), ordered by utterance, then frame; `lengths` is (B, 2)."""
        return cls._dense(lengths, lengths + torch.tensor([0, 1], device="cpu"), V)

    @classmethod
    def _dense(cls, lengths: Tensor, in_memory: Tensor, V: int) -> "Nodes":
        """Nodes of dense logits with `in_memory` (B, 2) frames and rows for each utterance."""
        sizes = torch.stack((lengths[:, 0] * (lengths[:, 1] + 1), in_memory.prod(1) * V), 1)
        first = sizes.cumsum(0) - sizes  # node, and logit
        rows = in_memory[:, 1:]
        return cls(torch.cat((lengths, first, rows * V, torch.full_like(rows, V), in_memory), 1))

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
        return self.table[:, PADDED_FRAMES] * self.table[:, PADDED_ROWS]

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The largest T and the largest U1 of the batch."""
        frames, labels = self.table[:, : LABELS + 1].amax(0).tolist()
        return frames, labels + 1

    @cached_property
    def frames(self) -> np.ndarray:
        """Utterance and frame of every frame in memory, padding included: int32 (frames, 2)."""
        counts = self.table[:, PADDED_FRAMES].numpy()
        utterance = np.repeat(np.arange(len(counts)), counts)
        frame = np.concatenate([*map(np.arange, counts)])
        return np.stack((utterance, frame), 1).astype(np.int32)

    def grid(self, logits: Tensor, b: int) -> Tensor:
        """Logits of utterance b with their padding, (T, U1, V), as a view."""
        row = self.table[b].tolist()
        size = (row[PADDED_FRAMES], row[PADDED_ROWS], logits.shape[-1])
        stride = (row[FRAME_STEP], row[LABEL_STEP], 1)
        return logits.detach().as_strided(size, stride, logits.storage_offset() + row[FIRST_LOGIT])

    def on(self, device: torch.device) -> Tensor:
        """The table on `device`. It is copied there once, and the copy does not block the CPU."""
        if device.type == "cpu":
            return self.table
        if device not in self._copies:
            self._copies[device] = to_device(self.table, device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}

    def slices(self, b: int) -> tuple[int, int, slice]:
        """Frames T and lattice rows U + 1 of utterance b, and its slice of the N nodes."""
        T, U, start = self.table[b, : FIRST_NODE + 1].tolist()
        return T, U + 1, slice(start, start + T * (U + 1))


def upload(batches: Sequence[Nodes], device: torch.device) -> None:
    """Copy the tables of several `Nodes` to `device` in one transfer."""
    tables = [nodes.table for nodes in batches]
    copies = to_device(torch.cat(tables), device).split([len(table) for table in tables])
    for nodes, table in zip(batches, copies, strict=True):
        nodes._copies[device] = table


@dataclass(frozen=True, kw_only=True)
class LatticeOptions:
    """Checked options of a loss.

    Attributes:
        blank: Index of blank, not negative.
        clamp: Limit of the gradient's elements; no limit if <= 0.
        fused_log_softmax: False if the logits are log-probabilities.
        fastemit_lambda: The posteriors of label arcs are scaled by 1 + this.
        overwrite_logits: Whether the gradient is written over the logits.
        durations: TDT's durations in frames; empty for RNN-T.
        sigma: Nats by which every token's log-probability is lowered.
        as_rnnt: Whether this call computes the RNN-T loss, without sigma, although the logits
            include durations (TDT's omega).
    """

    blank: int
    clamp: float = -1.0
    fused_log_softmax: bool = True
    fastemit_lambda: float = 0.0
    overwrite_logits: bool = False
    durations: tuple[int, ...] = ()
    sigma: float = 0.0
    as_rnnt: bool = False

    def steps(self, longest: int) -> list[tuple[int, int]]:
        """For each duration, the frames that a blank advances and the frames that a label does.

        A blank of 0 frames is no arc. A duration beyond the end of the longest lattice, which has
        `longest` frames, becomes `longest + 1`.
        """
        if not self.durations:
            return [(1, 0)]
        clipped = [min(duration, longest + 1) for duration in self.durations]
        return [(frames, frames) for frames in clipped]


class ArcLogProbs(NamedTuple):
    """Log-probabilities of the arcs out of every node, in nats.

    The dtype is float32, or float64 for float64 logits.

    Attributes:
        log_z: Log-normaliser of the token logits, (N,); 0 if they are log-probabilities already.
        blank_logp: Blank arcs, (N,).
        label_logp: Arcs of the next label, (N,); -inf if no label is left.
        duration_logp: The n durations of TDT, (N, n); (N, 0) for RNN-T.
    """

    log_z: Tensor
    blank_logp: Tensor
    label_logp: Tensor
    duration_logp: Tensor

    @classmethod
    def empty(cls, logits: Tensor, nodes: Nodes, n: int) -> "ArcLogProbs":
        """Uninitialised memory for all `nodes` and n durations, on the device of `logits`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_z, blank_logp, label_logp = logits.new_empty((3, nodes.count), dtype=dtype).unbind()
        duration_logp = logits.new_empty((nodes.count, n), dtype=dtype)
        return cls(log_z, blank_logp, label_logp, duration_logp)


@dataclass(frozen=True)
class ArcPosteriors:
    """Log-likelihood of every utterance, and posterior probability of every arc.

    The posterior of an arc is the share of the likelihood that belongs to paths through it. Label
    arcs are scaled by 1 + lambda (FastEmit). Posteriors have the dtype of the arc
    log-probabilities; they are None if no gradient is needed.

    Attributes:
        log_likelihood: (B,), float64, in nats.
        blank_posterior: Blank arc of each node, (N,).
        label_posterior: Label arc of each node, (N,).
        duration_posterior: Blank and label arcs of each duration together, (N, n); (N, 0) for
            RNN-T.
    """

    log_likelihood: Tensor
    blank_posterior: Tensor | None = None
    label_posterior: Tensor | None = None
    duration_posterior: Tensor | None = None


class Saved(NamedTuple):
    """What forward saves for the gradient, in addition to its inputs.

    `log_z`, `blank_posterior` and `label_posterior` are (N,). `duration_gradient` (N, n) is the
    finished gradient over the duration logits; n = 0 for RNN-T.
    """

    log_z: Tensor
    blank_posterior: Tensor
    label_posterior: Tensor
    duration_gradient: Tensor

    @classmethod
    def from_forward(cls, arcs: ArcLogProbs, posteriors: ArcPosteriors) -> "Saved":
        """Build the record from the results of both steps of forward.

        The gradient over the duration logits is the softmax times the posterior of the node, minus
        the posterior of the duration.
        """
        blank, label = posteriors.blank_posterior, posteriors.label_posterior
        by_duration = posteriors.duration_posterior
        assert blank is not None and label is not None and by_duration is not None
        softmax = arcs.duration_logp.exp()
        if not by_duration.numel():  # RNN-T, possibly of logits with durations
            return cls(arcs.log_z, blank, label, torch.zeros_like(softmax))
        duration_gradient = softmax * by_duration.sum(1, keepdim=True) - by_duration
        return cls(arcs.log_z, blank, label, duration_gradient)
