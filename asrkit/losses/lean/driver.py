"""Two passes over tiles of logits, of which never more than one tile exists.

First pass: for each tile the logits, of which the log-normaliser and the arcs' log-probabilities
are kept. Then the lattice. Second pass, in backward: the same logits again, turned into their
gradient, and that into the gradients of encoded, predicted, weight and bias.

Operations: 2 N D V for each of four matrix products (two for the logits, one for the hidden layer's
gradient, one for the weight's), where a joint that is kept needs three. Memory: a tile, N numbers
each of log-normalisers, arcs, posteriors and backward variables, and the gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from asrkit.losses.gradient import (
    Lattice,
    Saved,
    duration_gradient,
    refuse_second_derivative,
)
from asrkit.losses.lattice import FRAMES, LABELS, ArcLogProbs, LatticeOptions, Nodes

SEGMENT = 32  # tiles whose active nodes are looked up at once, on a CPU
NEGLIGIBLE = 1e-30  # a posterior this small changes no float32 sum of posteriors


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The joint's hidden layer, activation(encoded + predicted) with dropout, and how it is tiled.

    Args:
        activation: "relu" or "tanh".
        dropout: Probability that an element of the hidden layer is dropped.
        seed: Seed of dropout's mask.
        tile: Nodes whose logits, or these logits' gradient, exist at once.
    """

    activation: str = "relu"
    dropout: float = 0.0
    seed: int = 0
    tile: int = 1024


class Tiles(Protocol):
    """The tiles of one call; an implementation keeps its buffers in it."""

    def arc_log_probs(self, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of all nodes into `out`."""

    def gradients(self, saved: Saved, incoming: Tensor) -> tuple[Tensor, ...]:
        """Gradients of encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,).

        Args:
            saved: Of all nodes, from the first pass and the lattice.
            incoming: Gradient of the losses (B,), which scales those of each utterance.
        """


class NodeTiles:
    """Tiles of consecutive nodes, one after another: the base of the plain and the Numba tiles."""

    nodes: Nodes
    joint: Joint

    def arc_log_probs(self, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of all nodes into `out`."""
        for first in range(0, self.nodes.count, self.joint.tile):
            last = min(first + self.joint.tile, self.nodes.count)
            self.tile_log_probs(first, last, out)

    def gradients(self, saved: Saved, incoming: Tensor) -> tuple[Tensor, ...]:
        """Gradients of encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,).

        Args:
            saved: Of all nodes, from the first pass and the lattice.
            incoming: Gradient of the losses (B,), which scales those of each utterance.
        """
        log_z, blank_posterior, label_posterior, by_duration = saved
        table = self.nodes.on(log_z.device)
        sizes = table[:, FRAMES] * (table[:, LABELS] + 1)
        scale = incoming.repeat_interleave(sizes, output_size=self.nodes.count)  # (N,)
        for index in _active_nodes(blank_posterior + label_posterior, self.joint):
            tile_scale = scale[index]
            tile = Saved(
                log_z=log_z[index],
                blank_posterior=blank_posterior[index] * tile_scale,
                label_posterior=label_posterior[index] * tile_scale,
                duration_gradient=None,
            )
            if by_duration is not None:
                tile = tile._replace(duration_gradient=by_duration[index] * tile_scale[:, None])
            self.add_gradients(index, tile)
        return self.totals()

    def tile_log_probs(self, first: int, last: int, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of nodes first..last-1 into `out`."""
        raise NotImplementedError

    def add_gradients(self, index: Tensor, saved: Saved) -> None:
        """Add what the nodes `index` (n,) contribute to the gradients; `saved` is scaled."""
        raise NotImplementedError

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, zeros at first."""
        raise NotImplementedError


class LeanLoss(torch.autograd.Function):
    """Negative log-likelihood in nats, (B,), of checked arguments."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes tensors one by one
        ctx: Any,
        encoded: Tensor,
        predicted: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        joint: Joint,
        make_tiles: Callable[..., Tiles],
        lattice: Lattice,
    ) -> Tensor:
        """Losses of checked arguments; `ctx` keeps what the gradient needs, if one is.

        Args:
            ctx: Of autograd.
            encoded: (B, T, D).
            predicted: (B, U1, D).
            weight: (V, D) of the output layer, the durations' rows last.
            bias: (V,).
            targets: (B, U), int64.
            nodes: Where the numbers of each lattice node lie.
            options: Of the loss.
            joint: The hidden layer, and how it is tiled.
            make_tiles: Makes the `Tiles` of an implementation.
            lattice: The recursions, from a module of asrkit.losses.rnnt or .tdt.
        """
        inputs = (encoded, predicted, weight, bias, targets)
        needs_gradient = any(ctx.needs_input_grad)
        arcs = _empty_arcs(encoded, weight, nodes, len(options.durations))
        tiles = make_tiles(*inputs, nodes, options, joint)
        tiles.arc_log_probs(arcs)
        del tiles  # its buffers
        posteriors = lattice(arcs.lowered(options.sigma), nodes, options, needs_gradient)
        if needs_gradient:
            ctx.save_for_backward(
                *inputs,
                arcs.log_z,
                posteriors.blank_posterior,
                posteriors.label_posterior,
                duration_gradient(arcs, posteriors),
            )
            ctx.rest = (nodes, options, joint, make_tiles)
        return -posteriors.log_likelihood.to(arcs.log_z.dtype)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        refuse_second_derivative()
        tensors = ctx.saved_tensors
        inputs = tensors[:5]
        saved = Saved(*tensors[5:])
        nodes, options, joint, make_tiles = ctx.rest
        tiles = make_tiles(*inputs, nodes, options, joint)
        made = tiles.gradients(saved, incoming[0].to(saved.log_z).contiguous())
        gradients = [
            gradient.to(tensor.dtype) for gradient, tensor in zip(made, inputs[:4], strict=True)
        ]
        no_gradients = [None] * 6  # targets, nodes, options, joint, make_tiles, lattice
        return (*gradients, *no_gradients)


def _empty_arcs(encoded: Tensor, weight: Tensor, nodes: Nodes, durations: int) -> ArcLogProbs:
    """Room for the arcs' log-probabilities of all nodes, in float32 or better."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    log_z, blank_logp, label_logp = encoded.new_empty((3, nodes.count), dtype=dtype).unbind()
    duration_logp = None
    if durations:
        duration_logp = encoded.new_empty((nodes.count, durations), dtype=dtype)
    return ArcLogProbs(log_z, blank_logp, label_logp, duration_logp)


def _active_nodes(posterior: Tensor, joint: Joint) -> Iterator[Tensor]:
    """Indices of the nodes whose posterior matters, or is NaN, a tile at a time.

    On a GPU all nodes: to select some, the CPU would have to wait.
    """
    select = posterior.device.type == "cpu"
    step = joint.tile * SEGMENT
    for start in range(0, len(posterior), step):
        part = posterior[start : start + step]
        if select:
            index = (~(part <= NEGLIGIBLE)).nonzero()[:, 0]
        else:
            index = torch.arange(len(part), device=posterior.device)
        yield from (index + start).split(joint.tile)
