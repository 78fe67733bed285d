"""The lean losses as fused Triton kernels: the logits live in registers, and their gradient exists
for one run of tiles at a time.

    forward.scores         Hidden layer H of a tile, once; the weight in chunks of V; log-sum-exp
                           online. One launch for all tiles.
    backward.by_logits     The same product, turned into the logits' gradient G; writes H and G of
                           a run of tiles. One launch a run, as each of the following.
    backward.by_durations  TDT only: the duration columns of G.
    cuBLAS                 Gradient of the weight += G^T H, summed in float32.
    backward.by_halves     G W times the slope of H, summed over the tile and added to the gradients
                           of both halves.

Between forward and backward stands the lattice: Numba's two kernels with asrkit[cuda], else
torch's. Counted, a call with its gradient at B = 32, T = 200, U1 = 101, D = 640, V = 1025 in
bfloat16 takes 35 launches with the one and 1,611 with the other.

Memory: a run's G and H, V + D numbers a node in the weight's dtype; forward, D for each node of
the tiles at work, which stay in L2. V and D are rounded up to multiples of 64 (a copy of the
weight), so that every row is aligned. A tile all of whose nodes are skipped costs its zeros and
their part of the weight's gradient; a single skipped node saves nothing. In float32 products run
without tensor cores unless torch is told to allow TF32; sums over tiles are taken in any order.

Held to the plain tiles in Triton's interpreter and compiled for A100, H100 and B200; not yet run on
a GPU. asrkit.workbench.cost.lean predicts its time.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.gradient import Saved
from asrkit.losses.lean.driver import NEGLIGIBLE, Joint
from asrkit.losses.lean.triton import backward, forward, tile
from asrkit.losses.nodes import FRAMES, LABELS, ArcLogProbs, LatticeOptions, Nodes
from asrkit.runtime import INTERPRETED, tf32_asked

MULTIPLE = 64  # of V and D in the padded weight
FRAMES_OF = tile.FRAMES_OF.value
LABELS_OF = tile.LABELS_OF.value
ROWS = tile.ROWS.value
COLUMNS = {2: 128, 4: 64}  # of a product that a program computes at once, by bytes of a number
DEEP = {2: 64, 4: 16}  # of the two matrices that it multiplies at once


class Tiles:
    """`asrkit.losses.lean.driver.Tiles` on CUDA, in float32 or half precision."""

    def __init__(
        self,
        encoded: Tensor,
        predicted: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        joint: Joint,
    ) -> None:
        B, T, D = encoded.shape
        self.halves = (encoded.detach().contiguous(), predicted.detach().contiguous())
        self.weight = padded(weight.detach())
        self.bias = bias.detach().float().contiguous()
        self.shape = weight.shape
        self.targets = targets.contiguous()
        self.table = nodes.on(encoded.device)
        self.tiles = count_tiles(nodes)
        self.joint = joint
        self.columns = COLUMNS[weight.element_size()]
        durations = len(options.durations)
        self.outputs = {"V": bound(len(weight) - durations), "blank": options.blank}
        self.durations = {"n": durations, "BN": 0}
        if durations:
            self.durations["BN"] = triton.next_power_of_2(max(16, durations))
        self.common = {  # arguments of every kernel with a hidden layer
            "B": B,
            "T": T,
            "U1": predicted.shape[1],
            "D": D,
            "DEPTH": bound(self.weight.shape[1]),
            "BATCH": triton.next_power_of_2(B),
            "seed": signed(joint.seed),
            "least": signed(dropout.threshold(joint.dropout)),
            "keep": 1 / (1 - joint.dropout),
            "drops": joint.dropout > 0,
            "is_tanh": joint.activation == "tanh",
            "BK": DEEP[weight.element_size()],
            "TF32": tf32_asked(),
            "num_warps": 8,
            "num_stages": 3,
        }

    def arc_log_probs(self, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of all nodes into `out`."""
        programs = min(self.tiles, processors(self.weight.device))
        hidden = self.weight.new_empty(programs, ROWS, self.weight.shape[1])
        unused = out.log_z
        forward.scores[(programs,)](
            *self.halves,
            self.weight,
            self.bias,
            self.targets,
            self.table,
            hidden,
            out.log_z,
            out.blank_logp,
            out.label_logp,
            unused if out.duration_logp is None else out.duration_logp,
            turns=bound(triton.cdiv(self.tiles, programs)),
            outputs=len(self.bias),
            BV=self.columns,
            **self.outputs,
            **self.durations,
            **self.common,
        )

    def gradients(self, saved: Saved, incoming: Tensor) -> tuple[Tensor, ...]:
        """Gradients of encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,), summed
        in float32.

        Args:
            saved: Of all nodes, from the first pass and the lattice.
            incoming: Gradient of the losses (B,), which scales those of each utterance.
        """
        wide, depth = self.weight.shape
        saved = saved._replace(
            blank_posterior=saved.blank_posterior.contiguous(),
            label_posterior=saved.label_posterior.contiguous(),
        )
        runs = min(self.tiles, triton.cdiv(self.tiles * ROWS, self.joint.tile))
        tiles_of_run = triton.cdiv(self.tiles, runs)
        hidden = self.weight.new_empty(tiles_of_run, ROWS, depth)
        gradient = self.weight.new_empty(tiles_of_run, ROWS, wide)
        sizes = [self.weight.shape, (wide,), *(half.shape for half in self.halves)]
        by_weight, by_bias, by_encoded, by_predicted = zeros(sizes, like=saved.log_z)
        for first in range(0, self.tiles, tiles_of_run):
            tiles = min(tiles_of_run, self.tiles - first)
            place = {
                "first_tile": first,
                "WIDE": bound(wide),
                "skip": max(self.joint.skip, NEGLIGIBLE),
            }
            self._by_logits(tiles, place, saved, incoming, (hidden, gradient, by_bias))
            add_product(by_weight, gradient[:tiles].flatten(0, 1), hidden[:tiles].flatten(0, 1))
            backward.by_halves[(triton.cdiv(depth, self.columns) * tiles,)](
                *self.halves,
                self.weight,
                self.table,
                gradient,
                saved.blank_posterior,
                saved.label_posterior,
                by_encoded,
                by_predicted,
                BD=self.columns,
                **place,
                **self.common,
            )
        V, D = self.shape
        return by_encoded, by_predicted, by_weight[:V, :D], by_bias[:V]

    def _by_logits(
        self,
        tiles: int,
        place: dict[str, Any],
        saved: Saved,
        incoming: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write hidden layer and logits' gradient of a run of tiles, and add to the bias's: `out`.

        Args:
            tiles: Tiles of the run.
            place: Where it begins, and the other arguments of both kernels.
            saved: Of all nodes, the posteriors contiguous.
            incoming: Gradient of the losses (B,).
            out: Hidden layer, gradient over the logits, gradient of the bias.
        """
        hidden, gradient, by_bias = out
        backward.by_logits[(tiles,)](
            *self.halves,
            self.weight,
            self.bias,
            self.targets,
            self.table,
            hidden,
            gradient,
            saved.log_z,
            saved.blank_posterior,
            saved.label_posterior,
            incoming,
            by_bias,
            BV=self.columns,
            **place,
            **self.outputs,
            **self.common,
        )
        if saved.duration_gradient is None:
            return
        backward.by_durations[(tiles,)](
            self.table,
            gradient,
            saved.blank_posterior,
            saved.label_posterior,
            saved.duration_gradient.contiguous(),
            incoming,
            by_bias,
            V=self.outputs["V"],
            B=self.common["B"],
            BATCH=self.common["BATCH"],
            **place,
            **self.durations,
        )


def count_tiles(nodes: Nodes) -> int:
    """Tiles of the whole batch, from the lengths on the host. Those at an utterance's edges are
    partly empty.
    """
    frames = nodes.table[:, FRAMES]
    rows = nodes.table[:, LABELS] + 1
    down = (frames + FRAMES_OF - 1) // FRAMES_OF
    across = (rows + LABELS_OF - 1) // LABELS_OF
    return int((down * across).sum())


def processors(device: torch.device) -> int:
    """Programs of the forward kernel, which share out the tiles: one for each multiprocessor, as
    its registers allow.
    """
    if INTERPRETED:
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def bound(size: int) -> Any:
    """A loop's bound as a kernel takes it. Unknown to the compiler, so that it unrolls nothing; the
    interpreter must know it.
    """
    if INTERPRETED:
        return tl.constexpr(size)
    return size


def signed(number: int) -> int:
    """The int32 with the bits of a uint32, so that large ones take no other kernel."""
    if number >= 2**31:
        return number - 2**32
    return number


def padded(weight: Tensor) -> Tensor:
    """The weight (V, D) with zero rows and columns up to multiples of MULTIPLE."""
    V, D = weight.shape
    wide = triton.cdiv(V, MULTIPLE) * MULTIPLE
    depth = triton.cdiv(D, MULTIPLE) * MULTIPLE
    if (wide, depth) == (V, D):
        return weight.contiguous()
    larger = weight.new_zeros(wide, depth)
    larger[:V, :D] = weight
    return larger


def zeros(shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
    """Tensors of zeros in one piece of memory, which one launch fills."""
    sizes = [prod(shape) for shape in shapes]
    parts = like.new_zeros(sum(sizes)).split(sizes)
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T @ right to `total`; on CUDA no part of the sum is rounded to half precision.

    Args:
        total: The sum (n, m), float32, changed in place.
        left: (k, n).
        right: (k, m).
    """
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))
