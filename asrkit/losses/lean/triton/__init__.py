"""The lean losses as fused Triton kernels: logits live in registers, and of their gradient a run of
tiles exists at once.

    forward   scores        H = act(encoded + predicted) of a tile, once; W in chunks of V; online
    log-sum-exp     1 launch backward  by_logits     the same product, made into the logits'
    gradient G; H and G of a run of tiles          1 each run
              by_durations  TDT only: the duration columns of G
              1 (cuBLAS)      by_weight += G^T H, summed in float32
              1 by_halves     G W times the slope of H, summed over the tile, then added to both
              halves' gradients   1

Between them stands the lattice: Numba's two kernels with asrkit[cuda], else torch's. Counted, a
call with its gradient at B = 32, T = 200, U1 = 101, D = 640, V = 1025 in bfloat16 takes 35 launches
with the one and 1,611 with the other.

Memory: a run's G and H, tile (V + D) in the weight's dtype; forward D for each node of the tiles at
work, which stay in L2. V and D are rounded up to multiples of 64 (a copy of the weight), so that
every row is aligned. A tile all of whose nodes are skipped costs its zeros, their part of by_weight
and nothing else; other skipped nodes save nothing. In float32 products run without tensor cores
unless torch is told to allow TF32; sums over tiles are taken in any order. Held to the plain tiles
in Triton's interpreter and compiled for A100, H100 and B200; not yet run on a GPU.
asrkit.workbench.cost.lean predicts its time.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.lean.driver import NONE, Joint
from asrkit.losses.lean.triton import backward, forward, tile
from asrkit.losses.nodes import FRAMES, LABELS, ArcLogProbs, LatticeOptions, Nodes
from asrkit.runtime import INTERPRETED, tf32_asked

MULTIPLE = 64  # of V and D in the padded weight
FRAMES_OF, LABELS_OF, ROWS = tile.FRAMES_OF.value, tile.LABELS_OF.value, tile.ROWS.value
COLUMNS = {2: 128, 4: 64}  # of a product that a program computes at once, by bytes of a number
DEEP = {2: 64, 4: 16}  # of the two matrices that it multiplies at once


class Tiles:
    """asrkit.losses.lean.driver.Tiles."""

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
        (B, T, D), U1, n = encoded.shape, predicted.shape[1], len(options.durations)
        self.halves = encoded.detach().contiguous(), predicted.detach().contiguous()
        self.weight, self.targets, self.table = (
            padded(weight.detach()),
            targets.contiguous(),
            nodes.on(encoded.device),
        )
        self.bias, self.shape = bias.detach().float().contiguous(), weight.shape
        self.tiles, self.tile, self.skip = count_tiles(nodes), joint.tile, max(joint.skip, NONE)
        self.columns = COLUMNS[weight.element_size()]
        depth, p = self.weight.shape[1], joint.dropout
        self.outputs = {"V": bound(len(weight) - n), "blank": options.blank}
        self.durations = {"n": n, "BN": triton.next_power_of_2(max(16, n)) if n else 0}
        self.common = {  # arguments of every kernel with a hidden layer
            "B": B,
            "T": T,
            "U1": U1,
            "D": D,
            "DEPTH": bound(depth),
            "BATCH": triton.next_power_of_2(B),
            "seed": signed(joint.seed),
            "least": signed(dropout.threshold(p)),
            "keep": 1 / (1 - p),
            "drops": p > 0,
            "is_tanh": joint.activation == "tanh",
            "BK": DEEP[weight.element_size()],
            "TF32": tf32_asked(),
            "num_warps": 8,
            "num_stages": 3,
        }

    def scores(self, scores: ArcLogProbs) -> None:
        """Write the scores of all nodes."""
        programs = min(self.tiles, processors(self.weight.device))
        hidden = self.weight.new_empty(programs, ROWS, self.weight.shape[1])
        durations = scores.log_z if scores.duration_logp is None else scores.duration_logp
        forward.scores[(programs,)](
            *self.halves,
            self.weight,
            self.bias,
            self.targets,
            self.table,
            hidden,
            scores.log_z,
            scores.blank_logp,
            scores.label_logp,
            durations,
            turns=bound(triton.cdiv(self.tiles, programs)),
            outputs=len(self.bias),
            BV=self.columns,
            **self.outputs,
            **self.durations,
            **self.common,
        )

    def gradients(
        self,
        z: Tensor,
        blank_posterior: Tensor,
        label_posterior: Tensor,
        duration_gradient: Tensor | None,
        incoming: Tensor,
    ) -> tuple[Tensor, ...]:
        """Gradients by encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,), summed
        in float32.
        """
        wide, depth = self.weight.shape
        shares, runs = (
            (blank_posterior.contiguous(), label_posterior.contiguous()),
            min(self.tiles, triton.cdiv(self.tiles * ROWS, self.tile)),
        )
        each = triton.cdiv(self.tiles, runs)
        hidden, gradient = (
            self.weight.new_empty(each, ROWS, depth),
            self.weight.new_empty(each, ROWS, wide),
        )
        sizes = [self.weight.shape, (wide,), *(half.shape for half in self.halves)]
        by_weight, by_bias, by_encoded, by_predicted = zeros(sizes, like=z)
        for first in range(0, self.tiles, each):
            tiles = min(each, self.tiles - first)
            place = {"first_tile": first, "WIDE": bound(wide), "skip": self.skip}
            backward.by_logits[(tiles,)](
                *self.halves,
                self.weight,
                self.bias,
                self.targets,
                self.table,
                hidden,
                gradient,
                z,
                *shares,
                incoming,
                by_bias,
                BV=self.columns,
                **place,
                **self.outputs,
                **self.common,
            )
            if duration_gradient is not None:
                backward.by_durations[(tiles,)](
                    self.table,
                    gradient,
                    *shares,
                    duration_gradient.contiguous(),
                    incoming,
                    by_bias,
                    V=self.outputs["V"],
                    B=self.common["B"],
                    BATCH=self.common["BATCH"],
                    **place,
                    **self.durations,
                )
            add_product(by_weight, gradient[:tiles].flatten(0, 1), hidden[:tiles].flatten(0, 1))
            backward.by_halves[(triton.cdiv(depth, self.columns) * tiles,)](
                *self.halves,
                self.weight,
                self.table,
                gradient,
                *shares,
                by_encoded,
                by_predicted,
                BD=self.columns,
                **place,
                **self.common,
            )
        V, D = self.shape
        return by_encoded, by_predicted, by_weight[:V, :D], by_bias[:V]


def count_tiles(nodes: Nodes) -> int:
    """Tiles of the whole batch, those at an utterance's edges being partly empty; from the lengths
    on the host.
    """
    frames, labels = nodes.table[:, FRAMES], nodes.table[:, LABELS]
    return int((-(-frames // FRAMES_OF) * -(-(labels + 1) // LABELS_OF)).sum())


def processors(device: torch.device) -> int:
    """Programs of the forward kernel, which share out the tiles: one for each multiprocessor, as
    its registers allow.
    """
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def bound(size: int) -> Any:
    """A loop's bound as a kernel takes it. Unknown to the compiler, so that it unrolls nothing; the
    interpreter must know it.
    """
    return tl.constexpr(size) if INTERPRETED else size


def signed(number: int) -> int:
    """The int32 with the bits of a uint32, so that large ones take no other kernel."""
    return number - 2**32 if number >= 2**31 else number


def padded(weight: Tensor) -> Tensor:
    """The weight with zero rows and columns up to multiples of MULTIPLE."""
    V, D = weight.shape
    wide, depth = (triton.cdiv(size, MULTIPLE) * MULTIPLE for size in (V, D))
    if (wide, depth) == (V, D):
        return weight.contiguous()
    larger = weight.new_zeros(wide, depth)
    larger[:V, :D] = weight
    return larger


def zeros(shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
    """Tensors of zeros in one piece of memory, which one launch fills."""
    sizes = [prod(shape) for shape in shapes]
    return [
        part.view(*shape)
        for part, shape in zip(like.new_zeros(sum(sizes)).split(sizes), shapes, strict=True)
    ]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (n, m), float32, += left (k, n)^T @ right (k, m); on CUDA no part of the sum is rounded
    to half precision.
    """
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))
