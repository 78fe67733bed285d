"""The lean losses as fused Triton kernels: logits live in registers, and of their gradient a run of tiles exists at once.

    forward   scores        H = act(encoded + predicted) of a tile, once; W in chunks of V; online log-sum-exp     1 launch
    backward  by_logits     the same product, made into the logits' gradient G; H and G of a run of tiles          1 each run
              (cuBLAS)      by_weight += G^T H, summed in float32                                                  1
              by_durations  TDT only: the duration columns of G                                                    1
              by_halves     G W times the slope of H, summed over the tile, then added to both halves' gradients   1

Memory: a run's G and H, tile (V + D) in the weight's dtype; forward D for each node of the tiles at work, which stay in L2.
V and D are rounded up to multiples of 64 (a copy of the weight), so that every row is aligned. Held to the plain tiles in
Triton's interpreter and compiled for A100, H100 and B200; not yet run on a GPU. asrkit.cost.lean predicts its time.
"""

from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.availability import INTERPRETED
from asrkit.losses.lean.driver import NONE, Joint
from asrkit.losses.lean.triton import backward, forward, tile
from asrkit.losses.nodes import FRAMES, LABELS, Nodes, Options, Scores

MULTIPLE = 64  # of V and D
WARPS = 8  # of every kernel with a product


class Tiles:
    """asrkit.losses.lean.driver.Tiles."""

    def __init__(
        self, encoded: Tensor, predicted: Tensor, weight: Tensor, bias: Tensor, targets: Tensor,
        nodes: Nodes, options: Options, joint: Joint,
    ) -> None:  # fmt: skip
        (B, T, D), U1, n = encoded.shape, predicted.shape[1], len(options.durations)
        self.halves = encoded.detach().contiguous(), predicted.detach().contiguous()
        self.weight, self.targets, self.table = _padded(weight.detach()), targets.contiguous(), nodes.on(encoded.device)
        self.bias = bias.detach().float().contiguous()
        self.tiles, self.joint, self.outputs = count_tiles(nodes), joint, len(weight)
        self.wide, self.depth = self.weight.shape
        p = joint.dropout
        self.sizes = {"B": B, "T": T, "U1": U1, "D": D, "DEPTH": bound(self.depth), "BATCH": triton.next_power_of_2(B)}
        self.hidden = {"seed": joint.seed, "least": dropout.threshold(p), "keep": 1 / (1 - p), "drops": p > 0}
        self.hidden["is_tanh"] = joint.activation == "tanh"
        self.outs = {"V": bound(len(weight) - n), "outputs": len(weight), "n": n, "blank": options.blank}
        self.durations = {"BN": triton.next_power_of_2(max(16, n)) if n else 0}

    @cached_property
    def blocks(self) -> dict:
        """Shape of the blocks that a product is made of, and how its float32 numbers are multiplied."""
        half = self.weight.element_size() == 2
        tf32 = torch.backends.cuda.matmul.allow_tf32
        return {"BK": 64 if half else 16, "TF32": tf32, "num_warps": WARPS, "num_stages": 3}

    @property
    def columns(self) -> int:
        """Outputs, or columns of the hidden layer, that a program computes at once."""
        return 128 if self.weight.element_size() == 2 else 64

    def scores(self, scores: Scores) -> None:
        """Write the scores of all nodes."""
        programs = min(self.tiles, at_work(self.weight.device))
        hidden = self.weight.new_empty(programs, tile.ROWS.value, self.depth)
        durations = scores.z if scores.durations is None else scores.durations
        forward.scores[(programs,)](
            *self.halves, self.weight, self.bias, self.targets, self.table, hidden, scores.z, scores.stay, scores.emit, durations,
            turns=bound(triton.cdiv(self.tiles, programs)), BV=self.columns, **self.sizes, **self.outs, **self.hidden, **self.durations, **self.blocks,
        )  # fmt: skip

    def gradients(
        self, z: Tensor, by_blank: Tensor, by_label: Tensor, by_duration: Tensor | None, incoming: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients by encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,), summed in float32."""
        shares, each = (by_blank.contiguous(), by_label.contiguous()), max(1, self.joint.tile // tile.ROWS.value)
        by_encoded, by_predicted = (torch.zeros(half.shape, device=z.device) for half in self.halves)
        by_weight, by_bias = torch.zeros(self.weight.shape, device=z.device), torch.zeros(self.wide, device=z.device)
        run = min(each, self.tiles), tile.ROWS.value
        hidden, gradient = self.weight.new_empty(*run, self.depth), self.weight.new_empty(*run, self.wide)
        skip = max(self.joint.skip, NONE)
        for first in range(0, self.tiles, each):
            tiles = min(each, self.tiles - first)
            common = {"first_tile": first, "WIDE": bound(self.wide), "skip": skip, **self.sizes, **self.hidden, **self.blocks}
            backward.by_logits[(tiles,)](
                *self.halves, self.weight, self.bias, self.targets, self.table, hidden, gradient, z, *shares, incoming, by_bias,
                V=self.outs["V"], blank=self.outs["blank"], BV=self.columns, **common,
            )  # fmt: skip
            if by_duration is not None:
                n = self.outs["n"]
                backward.by_durations[(tiles,)](
                    self.table, gradient, *shares, by_duration.contiguous(), incoming, by_bias, first, self.sizes["B"],
                    self.outputs - n, n, self.wide, skip, self.sizes["BATCH"], **self.durations,
                )  # fmt: skip
            add_product(by_weight, gradient[:tiles].flatten(0, 1), hidden[:tiles].flatten(0, 1))
            backward.by_halves[(triton.cdiv(self.depth, self.columns), tiles)](
                *self.halves, self.weight, self.table, gradient, *shares, by_encoded, by_predicted, BD=self.columns, **common
            )
        return by_encoded, by_predicted, by_weight[: self.outputs, : self.sizes["D"]], by_bias[: self.outputs]


def count_tiles(nodes: Nodes) -> int:
    """Tiles of the whole batch, those at an utterance's edges being partly empty; from the lengths on the host."""
    frames, labels = nodes.table[:, FRAMES], nodes.table[:, LABELS]
    return int((-(-frames // tile.FRAMES_OF.value) * -(-(labels + 1) // tile.LABELS_OF.value)).sum())


def at_work(device: torch.device) -> int:
    """Programs of the forward kernel, which share out the tiles: one for each multiprocessor."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def bound(size: int) -> Any:
    """A loop's bound as a kernel takes it. Unknown to the compiler, so that it unrolls nothing; the interpreter must know it."""
    return tl.constexpr(size) if INTERPRETED else size


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (n, m), float32, += left (k, n)^T @ right (k, m); on CUDA no part of the sum is rounded to half precision."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))


def _padded(weight: Tensor) -> Tensor:
    """The weight with zero rows and columns up to multiples of MULTIPLE."""
    wide, depth = (triton.cdiv(size, MULTIPLE) * MULTIPLE for size in weight.shape)
    if weight.shape == (wide, depth):
        return weight.contiguous()
    padded = weight.new_zeros(wide, depth)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded
