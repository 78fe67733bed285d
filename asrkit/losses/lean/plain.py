"""The joint's tiles in plain torch, on any device and in any floating type.

Read this implementation first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.lattice import FIRST_NODE, LABELS
from asrkit.losses.lean.driver import RELU, TANH, NodeTiles


class NodeInputs(NamedTuple):
    """The inputs of nodes (n,).

    They are a row of encoded (B T, D), a row of predicted (B U1, D), the next label or -1, and the
    key of dropout's mask.
    """

    encoded: Tensor
    predicted: Tensor
    label: Tensor
    keys: Tensor


class Tiles(NodeTiles):
    """Tiles in plain torch; sums of gradients are in float32 or better."""

    def tile_log_probs(self, index: Tensor, out: Sequence[Tensor]) -> None:
        """Write the log-probabilities of the arcs of nodes `index` (n,) into `out`."""
        log_z, blank_logp, label_logp, duration_logp = out
        inputs = self.locate(index)
        hidden, _ = self._hidden(inputs)
        logits = self._logits(hidden)
        tokens = logits[:, : self.tokens]
        torch.logsumexp(tokens, -1, out=log_z)
        # infinite logits have no softmax, so the loss must not be finite
        log_z.masked_fill_(log_z.isinf(), torch.nan)
        torch.sub(tokens[:, self.options.blank], log_z, out=blank_logp)
        label = inputs.label.clamp(min=0)
        at_label = tokens.gather(1, label[:, None])[:, 0]
        torch.sub(at_label, log_z, out=label_logp)
        label_logp.masked_fill_(inputs.label < 0, -torch.inf)
        duration_logp.copy_(logits[:, self.tokens :].log_softmax(-1))

    def add_gradients(self, index: Tensor, saved: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Add the contribution of nodes `index` (n,) to the gradients `sums`."""
        log_z, blank_posterior, label_posterior, by_duration = saved
        inputs = self.locate(index)
        hidden, slope = self._hidden(inputs)
        # posterior times softmax, minus the arcs' posteriors
        softmax = self._logits(hidden).sub_(log_z[:, None]).exp_()
        by_logits = softmax.mul_((blank_posterior + label_posterior)[:, None])
        by_logits[:, self.options.blank] -= blank_posterior
        label = inputs.label.clamp(min=0)  # if there is no next label, its posterior is 0
        by_logits.scatter_add_(1, label[:, None], -label_posterior[:, None])
        by_logits[:, self.tokens :] = by_duration
        rounded = by_logits.to(self.weight.dtype)
        *by_halves, by_weight, by_bias = sums
        _add_to_halves(inputs, slope, rounded @ self.weight, by_halves)
        by_weight += rounded.T @ hidden
        by_bias += by_logits.sum(0)

    def tile_hidden(self, index: Tensor, out: Tensor) -> None:
        """Write the hidden layer of nodes `index` (n,) into `out` (n, D)."""
        out.copy_(self._hidden(self.locate(index))[0])

    def add_to_halves(
        self, index: Tensor, hidden: Tensor, by_hidden: Tensor, sums: Sequence[Tensor]
    ) -> None:
        """Add the contribution of nodes `index` (n,) to the gradients of both halves."""
        inputs = self.locate(index)
        _add_to_halves(inputs, self._hidden(inputs)[1], by_hidden, sums)

    def locate(self, index: Tensor) -> NodeInputs:
        """Return the inputs of nodes (n,)."""
        table = self.nodes.on(index.device)
        first_node = table[:, FIRST_NODE].contiguous()
        b = torch.searchsorted(first_node, index, right=True) - 1
        rows = table[b, LABELS] + 1
        place = index - first_node[b]
        t = place // rows
        u = place % rows
        if self.U1 == 1:
            label = torch.full_like(u, -1)
        else:
            label = self.targets[b, u.clamp(max=self.U1 - 2)]
        label = label.where(u + 1 < rows, -1)
        keys = u  # unused without dropout
        if self.dropout:
            keys = dropout.node_keys(b, t, u, self.seed)
        return NodeInputs(
            encoded=b * self.T + t,
            predicted=b * self.U1 + u,
            label=label,
            keys=keys,
        )

    def _hidden(self, inputs: NodeInputs) -> tuple[Tensor, Tensor]:
        """Return the hidden layer and its derivative by the sum of both halves, (n, D) each."""
        total = self.encoded[inputs.encoded] + self.predicted[inputs.predicted]
        if self.activation == TANH:
            hidden = total.tanh()
            slope = (1 - hidden * hidden).to(self.dtype)
        elif self.activation == RELU:
            hidden = total.relu()
            slope = (total > 0).to(self.dtype)
        else:
            hidden = total
            slope = torch.ones_like(total, dtype=self.dtype)
        if self.dropout:
            kept = dropout.mask(inputs.keys, total.shape[1], self.dropout)
            scale = kept.to(self.dtype) / (1 - self.dropout)
            hidden = hidden * scale
            slope = slope * scale
        return hidden.to(self.weight.dtype), slope

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (n, V) of the hidden layer (n, D), in float32 or better."""
        products = hidden @ self.weight.T
        return products.to(self.dtype) + self.bias


def _add_to_halves(
    inputs: NodeInputs, slope: Tensor, by_hidden: Tensor, sums: Sequence[Tensor]
) -> None:
    """Add the hidden layer's gradient, times its slope, to the gradients of both halves."""
    by_total = slope.mul_(by_hidden)
    for total, rows in zip(sums, (inputs.encoded, inputs.predicted), strict=True):
        total.index_add_(0, rows, by_total)
