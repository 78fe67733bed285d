"""What every loss begins with: arguments checked, where the nodes of its lattices lie in memory,
and what passes between its steps.

Implementations work on a flat list of N = sum of T (U + 1) valid nodes instead of (B, T, U1)
tensors. Node (t, u) of utterance b

- has its V logits at element `first_logit + t frame_step + u label_step` of the logits' storage,
- has its own numbers (log-normaliser, arc log-probabilities, arc posteriors) at index
  `first_node + t (U + 1) + u` of vectors of length N.

So padding costs nothing, and packed logits need no second kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isnan
from numbers import Integral, Real
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from asrkit.devices import CPU_FLOAT, to_device
from asrkit.shapes import dims, expect, expect_choice, is_finite, valid_mask, whole

Reduction = Literal["none", "mean", "sum"]

# Columns of the table of nodes, one row an utterance.
FRAMES = 0  # T, valid frames
LABELS = 1  # U, valid labels
FIRST_NODE = 2  # index of node (0, 0) among all N nodes
FIRST_LOGIT = 3  # element of the logits' storage at which node (0, 0) starts
FRAME_STEP = 4  # elements from one frame to the next
LABEL_STEP = 5  # elements from one lattice row to the next
PADDED_FRAMES = 6  # frames in memory, padding included
PADDED_ROWS = 7  # lattice rows in memory, padding included


@dataclass(frozen=True)
class Nodes:
    """Location of every lattice node: `table` (B, 8), int64, on the host; see the columns above."""

    table: Tensor

    @classmethod
    def padded(cls, logits: Tensor, lengths: Tensor) -> "Nodes":
        """Nodes of contiguous `logits` (B, T, U1, V); `lengths` (B, 2): frames and labels."""
        _, T, U1, V = logits.shape
        # "cpu" is named because torch's default device may be another
        in_memory = torch.tensor([[T, U1]], device="cpu").expand_as(lengths)
        return cls._of(lengths, in_memory, V)

    @classmethod
    def packed(cls, lengths: Tensor, V: int) -> "Nodes":
        """Nodes of packed logits (N, V), ordered by utterance, then frame; `lengths` is (B, 2)."""
        return cls._of(lengths, lengths + torch.tensor([0, 1], device="cpu"), V)

    @classmethod
    def _of(cls, lengths: Tensor, in_memory: Tensor, V: int) -> "Nodes":
        """Nodes of lattices of `lengths`, where frames and rows `in_memory` (B, 2) lie densely."""
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
        """Frames T and lattice rows U1 that hold any utterance's."""
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
        """The table on `device`, copied there once; no CPU waits for the copy."""
        if device.type == "cpu":
            return self.table
        if device not in self._copies:
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
    """Checked options of a loss.

    Attributes:
        blank: index of the blank, not negative.
        clamp: limit of the gradient's elements; none if <= 0.
        fused_log_softmax: False where the logits are log-probabilities.
        fastemit_lambda: label arcs' posteriors are scaled by 1 + this.
        overwrite_logits: whether the gradient is written over the logits.
        durations: of TDT, in frames; none for RNN-T.
        sigma: nats that a token's log-probability is lowered by.
        as_rnnt: whether arcs are RNN-T's, without sigma, though the logits have durations (TDT's
            omega).
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
        """Frames that blank takes and those that a label takes, for each duration.

        No blank takes 0 frames. Durations that lead beyond the `longest` lattice become one more.
        """
        if not self.durations:
            return [(1, 0)]
        clipped = [min(duration, longest + 1) for duration in self.durations]
        return [(frames, frames) for frames in clipped]


@dataclass(frozen=True)
class ArcLogProbs:
    """Log-probabilities of the arcs that leave every node, in nats.

    The dtype is float32, or float64 for float64 logits.

    Attributes:
        log_z: (N,) log-normaliser of the token logits; 0 where they are log-probabilities already.
        blank_logp: (N,) of the blank arc.
        label_logp: (N,) of the arc of the next label, -inf where no label is left.
        duration_logp: (N, n) of the n durations (TDT); (N, 0) for RNN-T.
    """

    log_z: Tensor
    blank_logp: Tensor
    label_logp: Tensor
    duration_logp: Tensor

    @classmethod
    def empty(cls, logits: Tensor, nodes: Nodes, n: int) -> "ArcLogProbs":
        """Room for those of all `nodes`, on the device of `logits`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_z, blank_logp, label_logp = logits.new_empty((3, nodes.count), dtype=dtype).unbind()
        duration_logp = logits.new_empty((nodes.count, n), dtype=dtype)
        return cls(log_z, blank_logp, label_logp, duration_logp)


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
        duration_posterior: (N, n) of blank and label arcs of each duration together (TDT), None
            for RNN-T.
    """

    log_likelihood: Tensor
    blank_posterior: Tensor | None = None
    label_posterior: Tensor | None = None
    duration_posterior: Tensor | None = None


def check_scores(tensor: Tensor, argument: str, encoded: Tensor | None = None) -> None:
    """Raise ValueError where `tensor`, the argument of that name, cannot hold scores.

    That is where it holds integers, has no element or is inside a torch.func transform. Beside
    `encoded`, it has to lie on the same device.
    """
    expect(tensor.is_floating_point(), argument, "floating point", tensor.dtype)
    expect(tensor.numel() > 0, argument, "no empty dimension", tuple(tensor.shape))
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # no public way to ask
    remedy = "Take gradients with torch.autograd."
    expect(not wrapped, argument, "a plain tensor", "one inside torch.func", remedy)
    if encoded is not None:
        wanted = f"a tensor on {encoded.device}, as encoded"
        expect(tensor.device == encoded.device, argument, wanted, tensor.device)


def check_halves(encoded: Tensor, predicted: Tensor) -> tuple[int, int, int, int]:
    """Sizes B, T, U1 and D of the halves of a joint, (B, T, D) and (B, U1, D); ValueError where
    they do not fit together.
    """
    B, T, D = dims(encoded, "B T D", "encoded")
    _, U1, _ = dims(predicted, "B U1 D", "predicted", B=B, D=D)
    check_scores(encoded, "encoded")
    check_scores(predicted, "predicted", encoded)
    same = predicted.dtype == encoded.dtype
    expect(same, "predicted", f"{encoded.dtype}, as encoded", predicted.dtype)
    return B, T, U1, D


def check_lengths(
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    *,
    like: Tensor,
    T: int | None,
    U1: int | None,
    V: int,
) -> Tensor:
    """Frames and labels of each utterance: int64 (B, 2), on the host.

    Where the integers lie on a GPU this fetches the lengths, and so waits for everything that was
    queued before them. Where all three lie on the host they are checked there, and nothing waits.

    Args:
        targets: labels (B, U), int32 or int64.
        logit_lengths: frames (B,), int32 or int64.
        target_lengths: labels (B,), int32 or int64.
        blank: index of the blank, -V to V - 1.
        like: the tensor of scores; the others lie on its device or on the host.
        T: frames of the padded scores; None for packed ones.
        U1: lattice rows of the padded scores; None for packed ones.
        V: tokens, blank included.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an utterance has no lattice.
    """
    is_token = isinstance(blank, Integral) and -V <= int(blank) < V
    expect(is_token, "blank", f"an index of V={V} tokens", repr(blank))
    sizes = {} if U1 is None else {"B": len(like)}
    sizes["B"], U = dims(targets, "B U", "targets", **sizes)
    U1 = U1 or U + 1
    rows = "logits have" if like.ndim == 4 else "predicted has"
    wanted = f"shape (B={sizes['B']}, U={U1 - 1})"
    remedy = f"{rows} U1 = U + 1 rows, one more than the labels."
    expect(U == U1 - 1, "targets", wanted, tuple(targets.shape), remedy)
    integers = {
        "targets": targets,
        "logit_lengths": logit_lengths,
        "target_lengths": target_lengths,
    }
    for name, tensor in integers.items():
        if name != "targets":
            dims(tensor, "B", name, **sizes)
        is_index = tensor.dtype in (torch.int32, torch.int64)
        expect(is_index, name, "int32 or int64", tensor.dtype)
        reachable = tensor.device in (like.device, torch.device("cpu"))
        expect(reachable, name, f"a tensor on cpu, or {like.device} as the scores", tensor.device)
    if any(tensor.device.type != "cpu" for tensor in integers.values()):
        moved = [to_device(tensor, like.device) for tensor in integers.values()]
        targets, logit_lengths, target_lengths = moved
    is_no_label = (targets < 0) | (targets >= V) | (targets == blank % V)
    wrong = is_no_label & valid_mask(target_lengths, U)
    counts = torch.stack((logit_lengths, target_lengths, wrong.sum(1)), 1).cpu()
    for b, (frames, labels, mistakes) in enumerate(counts.tolist()):
        allowed = "at least 1 frame" if T is None else f"1 to T={T} frames"
        where = f"in utterance {b}"
        expect(0 < frames <= (T or inf), "logit_lengths", allowed, f"{frames} {where}")
        expect(0 <= labels <= U, "target_lengths", f"0 to U={U} labels", f"{labels} {where}")
        if mistakes:
            label = int(targets[b][wrong[b]][0])
            allowed = f"labels 0..{V - 1} but blank={blank % V}"
            expect(False, "targets", allowed, f"{label} {where}")
    return counts[:, :2].long()


def as_index(targets: Tensor, device: torch.device) -> Tensor:
    """Targets as int64 on `device`; no CPU waits for the copy there.

    Those made in inference mode, which autograd would not save, are copied in any case.
    """
    indices = to_device(targets.long(), device)
    return indices.clone() if indices.is_inference() else indices


def check_options(reduction: str, clamp: float = -1.0, fastemit_lambda: float = 0.0) -> None:
    """Raise ValueError where `reduction`, `clamp` or `fastemit_lambda` is outside its range."""
    expect_choice("reduction", reduction, get_args(Reduction))
    finite = is_finite(fastemit_lambda) and fastemit_lambda >= 0
    expect(finite, "fastemit_lambda", "a finite number, at least 0", fastemit_lambda)
    is_number = isinstance(clamp, Real) and not isnan(clamp)
    expect(is_number, "clamp", "a number", clamp)


def check_durations(durations: Sequence[int], sigma: float, omega: float) -> None:
    """Raise ValueError where `durations`, `sigma` or `omega` (TDT) describes no lattice."""
    usable = (
        isinstance(durations, list | tuple)
        and all(whole(duration, 0) for duration in durations)
        and len(set(durations)) == len(durations)
        and any(durations)
    )
    wanted = "distinct frame counts, one of them above 0"
    expect(usable, "durations", wanted, durations, "Blank must be able to advance.")
    finite = is_finite(sigma) and sigma >= 0
    expect(finite, "sigma", "a finite number of nats, at least 0", sigma)
    is_probability = is_finite(omega) and 0 <= omega <= 1
    expect(is_probability, "omega", "a probability", omega)


def takes_plain_loss(omega: float) -> bool:
    """Whether this call of a TDT loss takes the RNN-T loss instead, with probability `omega`.

    One draw from torch's CPU generator, none for omega = 0.
    """
    return omega > 0 and float(torch.rand((), **CPU_FLOAT)) < omega


def reduce(costs: Tensor, reduction: Reduction) -> Tensor:
    """Losses (B,) as they are, or their mean or sum; one infinite loss makes these infinite too."""
    if reduction == "mean":
        return costs.mean()
    if reduction == "sum":
        return costs.sum()
    return costs
