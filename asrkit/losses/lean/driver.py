"""Two passes over tiles of logits; no more than one tile exists at a time.

The first pass computes the logits of each tile and keeps their log-normaliser and the arcs'
log-probabilities. Then the lattice follows. The second pass, in backward, computes the same logits
again, turns them into their gradient, and that into the gradients of encoded, predicted, weight and
bias.

Operations: 2 N D V for each of four matrix products: two for the logits, one for the gradient of
the hidden layer, one for that of the weight. A joint that is kept needs three. Memory: one tile, N
numbers each of log-normalisers, arcs, posteriors and backward variables, and the gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from asrkit.devices import to_device
from asrkit.losses.gradient import Recursions, check_backward, sum_paths
from asrkit.losses.lattice import ArcLogProbs, LatticeOptions, Nodes, Saved
from asrkit.shapes import expect, is_finite, whole

Activation = Literal["none", "relu", "tanh"]
LeanActivation = Literal["relu", "tanh"]  # those of the lean losses
_, RELU, TANH = range(3)  # codes of `Activation`, for compiled code
MIN_TILE = 64  # nodes of a tile by default, at least
SEGMENT = 32  # tiles whose active nodes are found at once, on a CPU
NEGLIGIBLE = 1e-30  # a posterior this small changes no float32 sum of posteriors


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The hidden layer of the joint, activation(encoded + predicted) with dropout, and its tiles.

    Args:
        activation: Its activation, already checked.
        dropout: Probability that an element of the hidden layer is dropped.
        seed: Seed of the dropout mask; None draws one from torch's default generator.
        tile: Nodes of a tile; None chooses a default for the device.

    Raises:
        ValueError: An argument is outside its range.
    """

    activation: Activation
    dropout: float
    seed: int | None
    tile: int | None = None

    def __post_init__(self) -> None:
        is_probability = is_finite(self.dropout) and 0 <= self.dropout < 1
        expect(is_probability, "dropout", "a probability below 1", repr(self.dropout))
        fits = self.tile is None or whole(self.tile, 1)
        expect(fits, "tile", "a number of nodes, at least 1", repr(self.tile))
        fits = self.seed is None or whole(self.seed, 0, 2**32 - 1)
        expect(fits, "seed", "an integer of 32 bits", repr(self.seed))
        if self.dropout and self.seed is None:
            object.__setattr__(self, "seed", int(torch.randint(2**31, (), device="cpu")))


class NodeTiles:
    """Tiles of consecutive nodes: the base class of every implementation.

    The plain and the Numba tiles override the methods for one tile, and Triton's tiles the methods
    for all nodes. A weight without rows (0, D) leaves the hidden layer alone, for `pack_joint`.
    """

    bias_rows = 1  # rows of the partial sums of the bias's gradient
    cpu_tile_bytes = 4 << 20  # bytes of a tile by default; they fit a core's cache
    gpu_tile_bytes = 16 << 20  # they fit a GPU's cache

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
        self.options = options
        self.tokens = len(weight) - len(options.durations)  # V; the durations' logits follow
        self.dropout = joint.dropout
        self.seed = joint.seed or 0  # None only without dropout
        self.activation = get_args(Activation).index(joint.activation)
        on_cpu = weight.device.type == "cpu"
        tile_bytes = self.cpu_tile_bytes if on_cpu else self.gpu_tile_bytes
        row_bytes = max(weight.shape) * weight.element_size()
        self.tile = joint.tile or max(MIN_TILE, tile_bytes // row_bytes)

    def arc_log_probs(self, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of all nodes into `out`."""
        for index, *tile in self._split(*out):
            self.tile_log_probs(index, tile)

    def gradients(self, saved: Saved, incoming: Tensor) -> Sequence[Tensor]:
        """Return the gradients of encoded (B T, D), predicted (B U1, D), weight (V, D), bias (V,).

        Args:
            saved: What the first pass and the lattice saved, for all nodes.
            incoming: Gradient over the losses (B,); it scales the gradients of each utterance.
        """
        log_z, blank_posterior, label_posterior, by_duration = saved
        sizes = to_device(self.nodes.sizes, log_z.device)
        scale = incoming.repeat_interleave(sizes, output_size=self.nodes.count)  # (N,)
        sums = self.zeros_like(self.encoded, self.predicted, self.weight)
        sums.append(self.bias.new_zeros(self.bias_rows, len(self.bias)))
        for index in _active_nodes(blank_posterior + label_posterior, self.tile):
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

    def hidden_layer(self, out: Tensor) -> None:
        """Write the hidden layer of all nodes into `out` (N, D)."""
        for index, rows in self._split(out):
            self.tile_hidden(index, rows)

    def halves_gradients(self, hidden: Tensor, by_hidden: Tensor) -> Sequence[Tensor]:
        """Return the gradients of encoded (B T, D) and predicted (B U1, D).

        Args:
            hidden: What `hidden_layer` wrote, (N, D).
            by_hidden: Gradient over it, (N, D).
        """
        sums = self.zeros_like(self.encoded, self.predicted)
        for index, rows, by_rows in self._split(hidden, by_hidden):
            self.add_to_halves(index, rows, by_rows, sums)
        return sums

    def zeros_like(self, *tensors: Tensor) -> list[Tensor]:
        """Return sums of 0 with the shapes of `tensors`, in float32 or better."""
        return [torch.zeros_like(tensor, dtype=self.dtype) for tensor in tensors]

    def _split(self, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the nodes (n,) of each tile, and their part of each column (N, ...)."""
        all_nodes = torch.arange(self.nodes.count, device=self.weight.device)
        return zip(*(column.split(self.tile) for column in (all_nodes, *columns)), strict=True)

    def tile_hidden(self, index: Tensor, out: Tensor) -> None:
        """Write the hidden layer of nodes `index` (n,) into `out` (n, D)."""
        raise NotImplementedError

    def add_to_halves(
        self, index: Tensor, hidden: Tensor, by_hidden: Tensor, sums: Sequence[Tensor]
    ) -> None:
        """Add one tile's part to the gradients of both halves.

        Args:
            index: The tile's nodes (n,).
            hidden: Their hidden layer (n, D).
            by_hidden: Gradient over it (n, D).
            sums: Gradients of encoded (B T, D) and predicted (B U1, D).
        """
        raise NotImplementedError

    def tile_log_probs(self, index: Tensor, out: Sequence[Tensor]) -> None:
        """Write the log-probabilities of the arcs of one tile.

        Args:
            index: The tile's nodes (n,).
            out: Log-normalisers (n,), log-probabilities of blank (n,), of the next label (n,) and
                of each duration, (n, 0) for RNN-T.
        """
        raise NotImplementedError

    def add_gradients(self, index: Tensor, saved: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Add the contribution of one tile to the gradients.

        Args:
            index: The tile's nodes (n,).
            saved: Log-normalisers (n,), posteriors of blank (n,) and of the label (n,), and the
                gradient over the durations' logits, (n, 0) for RNN-T. All but the first are scaled.
            sums: Gradients of encoded (B T, D), predicted (B U1, D) and weight (V, D), and
                `bias_rows` partial sums of the bias's gradient.
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
        make_tiles: type[NodeTiles],
        lattice: Recursions,
    ) -> Tensor:
        """Return the losses; `ctx` saves what the gradient needs, if an input requires one.

        Args:
            ctx: Autograd's context.
            encoded: (B, T, D).
            predicted: (B, U1, D).
            weight: Output layer (V, D), the durations' rows last.
            bias: (V,).
            targets: (B, U), int64.
            nodes: Positions of the lattice nodes in vectors of length N.
            options: Checked options of the loss.
            joint: The hidden layer, and the size of its tiles.
            make_tiles: The implementation's subclass of `NodeTiles`, which holds its buffers.
            lattice: The implementation's recursions.
        """
        inputs = (encoded, predicted, weight, bias, targets)
        needs_gradient = any(ctx.needs_input_grad)
        arcs = ArcLogProbs.empty(weight, nodes, len(options.durations))
        tiles = make_tiles(*inputs, nodes, options, joint)
        tiles.arc_log_probs(arcs)
        del tiles  # frees its buffers
        posteriors = sum_paths(lattice, arcs, nodes, options, needs_gradient)
        if needs_gradient:
            ctx.save_for_backward(*inputs, *Saved.from_forward(arcs, posteriors))
            ctx.rest = (nodes, options, joint, make_tiles)
        return -posteriors.log_likelihood.to(arcs.log_z.dtype)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        check_backward(incoming[0])
        tensors = ctx.saved_tensors
        inputs = tensors[:5]
        saved = Saved(*tensors[5:])
        *rest, make_tiles = ctx.rest
        tiles = make_tiles(*inputs, *rest)
        sums = tiles.gradients(saved, incoming[0].to(saved.log_z).contiguous())
        gradients = [
            gradient.view(tensor.shape).to(tensor.dtype)
            for gradient, tensor in zip(sums, inputs[:4], strict=True)
        ]
        no_gradients = [None] * 6  # targets, nodes, options, joint, make_tiles, lattice
        return (*gradients, *no_gradients)


def _active_nodes(posterior: Tensor, tile: int) -> Iterator[Tensor]:
    """Yield indices of the nodes whose posterior is not negligible, or is NaN, a tile at a time.

    On a GPU it yields all nodes, because the CPU would have to wait for the selection.
    """
    select = posterior.device.type == "cpu"
    step = tile * SEGMENT
    for start in range(0, len(posterior), step):
        part = posterior[start : start + step]
        if select:
            index = (~(part <= NEGLIGIBLE)).nonzero()[:, 0]
        else:
            index = torch.arange(len(part), device=posterior.device)
        yield from (index + start).split(tile)
