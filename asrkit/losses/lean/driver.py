"""Transducer losses from the two halves of the joint: two passes over tiles of logits, and never
more than one tile.

First pass: logits of some nodes at a time, of which the log-normaliser and the arcs'
log-probabilities stay. Then the lattice. Second pass, in backward: the same logits again, made into
their gradient, and that into gradients of encoded, predicted, weight and bias. FLOPs: 2 N D V for
each of four matrix products (two for the logits, one by hidden layer, one by weight), where a joint
that is kept needs three. Memory: a tile, N (z, arcs, shares, backward variables), and the
gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from asrkit.losses.gradient import Lattice, duration_gradient, refuse_second_derivative
from asrkit.losses.nodes import FRAMES, LABELS, ArcLogProbs, LatticeOptions, Nodes

SEGMENT = 32  # tiles whose active nodes are looked for at once, on a CPU
NONE = 1e-30  # a share so small adds nothing to any float32 sum of shares


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The joint's hidden layer, activation(encoded + predicted) with dropout, and how it is worked
    through.
    """

    activation: str = "relu"
    dropout: float = 0.0
    seed: int = 0
    tile: int = 1024  # nodes whose logits, or these logits' gradient, exist at once
    skip: float = (
        0.0  # nodes whose share of the likelihood is no larger are left out of the second pass
    )


class Tiles(Protocol):
    """Tiles of one call: an implementation keeps its buffers in it."""

    def scores(self, scores: ArcLogProbs) -> None:
        """Write the scores of all nodes."""

    def gradients(
        self,
        z: Tensor,
        blank_posterior: Tensor,
        label_posterior: Tensor,
        duration_gradient: Tensor | None,
        incoming: Tensor,
    ) -> tuple[Tensor, ...]:
        """Gradients by encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,), times
        `incoming` (B,).
        """


class NodeTiles:
    """Tiles of consecutive nodes, one after another: what the plain tiles and those of Numba have
    in common.
    """

    nodes: Nodes
    joint: Joint

    def scores(self, scores: ArcLogProbs) -> None:
        """Write the scores of all nodes."""
        for first in range(0, self.nodes.count, self.joint.tile):
            self.score(first, min(first + self.joint.tile, self.nodes.count), scores)

    def gradients(
        self,
        z: Tensor,
        blank_posterior: Tensor,
        label_posterior: Tensor,
        duration_gradient: Tensor | None,
        incoming: Tensor,
    ) -> tuple[Tensor, ...]:
        """Gradients by encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,), times
        `incoming` (B,).
        """
        sizes = self.nodes.on(z.device)[:, FRAMES] * (self.nodes.on(z.device)[:, LABELS] + 1)
        scale = incoming.repeat_interleave(sizes, output_size=self.nodes.count)  # (N,)
        for index in _active(blank_posterior + label_posterior, self.joint):
            part = scale[index]
            durations = (
                None if duration_gradient is None else duration_gradient[index] * part[:, None]
            )
            self.accumulate(
                index,
                z[index],
                blank_posterior[index] * part,
                label_posterior[index] * part,
                durations,
            )
        return self.totals()

    def score(self, first: int, last: int, scores: ArcLogProbs) -> None:
        """Write the scores of nodes first..last-1 into `scores`."""
        raise NotImplementedError

    def accumulate(
        self,
        index: Tensor,
        z: Tensor,
        blank_posterior: Tensor,
        label_posterior: Tensor,
        durations: Tensor | None,
    ) -> None:
        """Add what the nodes `index` (n,) contribute to the gradients; the others are theirs,
        already scaled.
        """
        raise NotImplementedError

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, zeros at first."""
        raise NotImplementedError


class LeanLoss(torch.autograd.Function):
    """Negative log-likelihood in nats, (B,), of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        encoded: Tensor,
        predicted: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        joint: Joint,
        make: Callable[..., Tiles],
        lattice: Lattice,
    ) -> Tensor:
        given, n, grad = (
            (encoded, predicted, weight, bias, targets),
            len(options.durations),
            any(ctx.needs_input_grad),
        )
        dtype = torch.promote_types(weight.dtype, torch.float32)
        z, stay, emit = encoded.new_empty((3, nodes.count), dtype=dtype).unbind()
        scores = ArcLogProbs(
            z, stay, emit, encoded.new_empty((nodes.count, n), dtype=dtype) if n else None
        )
        tiles = make(*given, nodes, options, joint)
        tiles.scores(scores)
        del tiles
        shares = lattice(scores.lowered(options.sigma), nodes, options, grad)
        if grad:
            ctx.save_for_backward(
                *given,
                z,
                shares.blank_posterior,
                shares.label_posterior,
                duration_gradient(scores, shares),
            )
            ctx.rest = nodes, options, joint, make
        return -shares.log_likelihood.to(dtype)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        refuse_second_derivative()
        *given, z, blank_posterior, label_posterior, durations = ctx.saved_tensors
        nodes, options, joint, make = ctx.rest
        made = make(*given, nodes, options, joint).gradients(
            z, blank_posterior, label_posterior, durations, incoming[0].to(z).contiguous()
        )
        grads = (grad.to(like.dtype) for grad, like in zip(made, given, strict=False))
        return (*grads, *[None] * 6)


def _active(share: Tensor, joint: Joint) -> Iterator[Tensor]:
    """Indices of the nodes with a share above joint.skip, or of NaN, a tile at a time."""
    for start in range(0, len(share), joint.tile * SEGMENT):
        part = share[start : start + joint.tile * SEGMENT]
        found = (
            (~(part <= max(joint.skip, NONE))).nonzero()[:, 0]
            if share.device.type == "cpu" or joint.skip
            else None
        )
        everything = (
            torch.arange(len(part), device=share.device) if found is None else found
        )  # no wait for a GPU
        yield from (everything + start).split(joint.tile)
