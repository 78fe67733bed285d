"""Two passes over tiles of logits, of which never more than one tile exists.

First pass: for each tile the logits, of which the log-normaliser and the arcs' log-probabilities
are kept. Then the lattice. Second pass, in backward: the same logits again, turned into their
gradient, and that into the gradients of encoded, predicted, weight and bias.

Operations: 2 N D V for each of four matrix products (two for the logits, one for the hidden layer's
gradient, one for the weight's), where a joint that is kept needs three. Memory: a tile, N numbers
each of log-normalisers, arcs, posteriors and backward variables, and the gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrkit.devices import to_device
from asrkit.losses.gradient import (
    Recursions,
    Saved,
    check_backward,
    sum_paths,
    to_save,
)
from asrkit.losses.lattice import ArcLogProbs, LatticeOptions, Nodes

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

    activation: str
    dropout: float
    seed: int
    tile: int


class NodeTiles:
    """Tiles of consecutive nodes, one after another: the base of the plain and the Numba tiles."""

    bias_rows = 1  # of the sum that is the bias's gradient
    cpu_tile_MiB = 4  # of a tile by default: what a core's cache holds
    gpu_tile_MiB = 16  # what a GPU's cache holds

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
        self.T = encoded.shape[1]
        self.U1 = predicted.shape[1]
        self.dtype = torch.promote_types(weight.dtype, torch.float32)  # of all sums
        self.encoded = encoded.detach().flatten(0, 1).contiguous()  # (B T, D)
        self.predicted = predicted.detach().flatten(0, 1).contiguous()  # (B U1, D)
        self.weight = weight.detach()
        self.bias = bias.detach().to(self.dtype).contiguous()
        self.targets = targets
        self.nodes = nodes
        self.table = nodes.on(encoded.device)
        self.joint = joint
        self.blank = options.blank
        self.tokens = len(weight) - len(options.durations)  # V; the durations' logits follow

    def arc_log_probs(self, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of all nodes into `out`."""
        everything = torch.arange(self.nodes.count, device=self.weight.device)
        columns = (everything, out.log_z, out.blank_logp, out.label_logp, out.duration_logp)
        for index, *tile in zip(*(c.split(self.joint.tile) for c in columns), strict=True):
            self.tile_log_probs(index, tile)

    def gradients(self, saved: Saved, incoming: Tensor) -> Sequence[Tensor]:
        """Gradients of encoded (B T, D), predicted (B U1, D), weight (V, D) and bias (V,).

        Args:
            saved: Of all nodes, from the first pass and the lattice.
            incoming: Gradient of the losses (B,), which scales those of each utterance.
        """
        log_z, blank_posterior, label_posterior, by_duration = saved
        sizes = to_device(self.nodes.sizes, log_z.device)
        scale = incoming.repeat_interleave(sizes, output_size=self.nodes.count)  # (N,)
        inputs = (self.encoded, self.predicted, self.weight)
        sums = [torch.zeros_like(tensor, dtype=self.dtype) for tensor in inputs]
        sums.append(self.bias.new_zeros(self.bias_rows, len(self.bias)))
        for index in _active_nodes(blank_posterior + label_posterior, self.joint):
            tile_scale = scale[index]
            tile = (
                log_z[index],
                blank_posterior[index] * tile_scale,
                label_posterior[index] * tile_scale,
                by_duration[index] * tile_scale[:, None],
            )
            self.add_gradients(index, tile, sums)
        by_encoded, by_predicted, by_weight, by_bias = sums
        return by_encoded, by_predicted, by_weight, by_bias.sum(0)

    def tile_log_probs(self, index: Tensor, out: Sequence[Tensor]) -> None:
        """Write the log-probabilities of the arcs of a tile.

        Args:
            index: The tile's nodes (n,).
            out: Log-normalisers (n,), log-probabilities of blank (n,), of the next label (n,) and
                of each duration, (n, 0) for RNN-T.
        """
        raise NotImplementedError

    def add_gradients(self, index: Tensor, saved: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Add what a tile contributes to the gradients.

        Args:
            index: The tile's nodes (n,).
            saved: Log-normalisers (n,), posteriors of blank (n,) and of the label (n,), and the
                gradient over the durations' logits, (n, 0) for RNN-T. All but the first are scaled.
            sums: Gradients of encoded (B T, D), predicted (B U1, D), weight (V, D), and of the bias
                in `bias_rows` parts.
        """
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
        make_tiles: Callable[..., Any],
        lattice: Recursions,
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
            make_tiles: Makes the tiles of one call, with the two methods of `NodeTiles` that have a
                body; an implementation keeps its buffers in them.
            lattice: The recursions.
        """
        inputs = (encoded, predicted, weight, bias, targets)
        needs_gradient = any(ctx.needs_input_grad)
        arcs = ArcLogProbs.empty(weight, nodes, len(options.durations))
        tiles = make_tiles(*inputs, nodes, options, joint)
        tiles.arc_log_probs(arcs)
        del tiles  # its buffers
        posteriors = sum_paths(lattice, arcs, nodes, options, needs_gradient)
        if needs_gradient:
            ctx.save_for_backward(*inputs, *to_save(arcs, posteriors))
            ctx.rest = (nodes, options, joint, make_tiles)
        return -posteriors.log_likelihood.to(arcs.log_z.dtype)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        check_backward(incoming[0])
        tensors = ctx.saved_tensors
        inputs = tensors[:5]
        saved = Saved(*tensors[5:])
        nodes, options, joint, make_tiles = ctx.rest
        tiles = make_tiles(*inputs, nodes, options, joint)
        made = tiles.gradients(saved, incoming[0].to(saved.log_z).contiguous())
        gradients = [
            gradient.view(tensor.shape).to(tensor.dtype)
            for gradient, tensor in zip(made, inputs[:4], strict=True)
        ]
        no_gradients = [None] * 6  # targets, nodes, options, joint, make_tiles, lattice
        return (*gradients, *no_gradients)


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
