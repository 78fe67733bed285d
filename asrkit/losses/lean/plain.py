"""The joint's tiles in plain torch: any device, any floating type, matrix products by the library.

The one to read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.gradient import Saved
from asrkit.losses.lattice import FIRST_NODE, LABELS, ArcLogProbs, LatticeOptions, Nodes
from asrkit.losses.lean.driver import Joint, NodeTiles


class NodeInputs(NamedTuple):
    """Where nodes (n,) take their inputs from.

    Rows of encoded (B T, D) and predicted (B U1, D), the next label or -1, and the key of
    dropout's mask.
    """

    encoded: Tensor
    predicted: Tensor
    label: Tensor
    keys: Tensor


class Tiles(NodeTiles):
    """`asrkit.losses.lean.driver.Tiles`; sums of gradients are in float32 or better."""

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
        _, self.T, self.D = encoded.shape
        self.U1 = predicted.shape[1]
        self.encoded = encoded.detach().reshape(-1, self.D).contiguous()  # (B T, D)
        self.predicted = predicted.detach().reshape(-1, self.D).contiguous()  # (B U1, D)
        self.weight = weight.detach()
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.bias = bias.detach().to(self.dtype).contiguous()
        self.shapes = (encoded.shape, predicted.shape, weight.shape, bias.shape)
        self.targets = targets
        self.nodes = nodes
        self.table = nodes.on(encoded.device)
        self.first_node = self.table[:, FIRST_NODE].contiguous()
        self.joint = joint
        self.blank = options.blank
        self.tokens = len(weight) - len(options.durations)  # V; the durations' logits follow
        self.sums: tuple[Tensor, ...] = ()

    def tile_log_probs(self, first: int, last: int, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of nodes first..last-1 into `out`."""
        inputs = self.locate(torch.arange(first, last, device=self.weight.device))
        hidden, _ = self._hidden(inputs)
        logits = self._logits(hidden)
        tokens = logits[:, : self.tokens]
        has_no_label = inputs.label < 0
        label = inputs.label.clamp(min=0)
        at_label = tokens.gather(1, label[:, None])[:, 0]
        tile = slice(first, last)
        log_z = torch.logsumexp(tokens, -1, out=out.log_z[tile])
        # as in the rows of logits: an overflow is not a missing path
        log_z.masked_fill_(log_z.isinf(), torch.nan)
        torch.sub(tokens[:, self.blank], log_z, out=out.blank_logp[tile])
        label_logp = at_label - log_z
        out.label_logp[tile] = label_logp.masked_fill(has_no_label, -torch.inf)
        if out.duration_logp is not None:
            durations = logits[:, self.tokens :]
            out.duration_logp[tile] = durations.log_softmax(-1)

    def add_gradients(self, index: Tensor, saved: Saved) -> None:
        """Add what the nodes `index` (n,) contribute to the gradients; `saved` is scaled."""
        inputs = self.locate(index)
        hidden, slope = self._hidden(inputs)
        by_logits = self._logits_gradient(hidden, inputs.label, saved)
        rounded = by_logits.to(self.weight.dtype)
        by_hidden = (rounded @ self.weight).to(self.dtype)
        by_hidden.mul_(slope)
        by_encoded, by_predicted, by_weight, by_bias = self.totals()
        by_encoded.view(-1, self.D).index_add_(0, inputs.encoded, by_hidden)
        by_predicted.view(-1, self.D).index_add_(0, inputs.predicted, by_hidden)
        by_weight += rounded.T @ hidden
        by_bias += by_logits.sum(0)

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, zeros at first."""
        if not self.sums:
            device = self.weight.device
            sums = [torch.zeros(size, dtype=self.dtype, device=device) for size in self.shapes]
            self.sums = tuple(sums)
        return self.sums

    def locate(self, index: Tensor) -> NodeInputs:
        """Where nodes (n,) take their hidden layer and their label from."""
        b = torch.searchsorted(self.first_node, index, right=True) - 1
        rows = self.table[b, LABELS] + 1
        place = index - self.first_node[b]
        t = place // rows
        u = place % rows
        if self.U1 == 1:
            label = torch.full_like(u, -1)
        else:
            label = self.targets[b, u.clamp(max=self.U1 - 2)]
        label = label.where(u + 1 < rows, -1)
        keys = u  # not used without dropout
        if self.joint.dropout:
            keys = dropout.node_keys(b, t, u, self.joint.seed)
        return NodeInputs(
            encoded=b * self.T + t,
            predicted=b * self.U1 + u,
            label=label,
            keys=keys,
        )

    def _hidden(self, inputs: NodeInputs) -> tuple[Tensor, Tensor]:
        """Hidden layer and its derivative by the sum of both halves, (n, D) each."""
        total = self.encoded[inputs.encoded] + self.predicted[inputs.predicted]
        if self.joint.activation == "tanh":
            hidden = total.tanh()
            slope = (1 - hidden * hidden).to(self.dtype)
        else:
            hidden = total.relu()
            slope = (total > 0).to(self.dtype)
        if self.joint.dropout:
            kept = dropout.mask(inputs.keys, self.D, self.joint.dropout)
            scale = kept.to(self.dtype) / (1 - self.joint.dropout)
            hidden = hidden * scale
            slope = slope * scale
        return hidden.to(self.weight.dtype), slope

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) of the hidden layer (n, D), in float32 or better."""
        products = hidden @ self.weight.T
        return products.to(self.dtype) + self.bias

    def _logits_gradient(self, hidden: Tensor, label: Tensor, saved: Saved) -> Tensor:
        """Gradient over the logits (n, V): posterior times softmax, minus the arcs' posteriors."""
        posterior = saved.blank_posterior + saved.label_posterior
        logits = self._logits(hidden)
        softmax = logits.sub_(saved.log_z[:, None]).exp_()
        gradient = softmax.mul_(posterior[:, None])
        gradient[:, self.blank] -= saved.blank_posterior
        # a node without a next label has a label posterior of 0
        label = label.clamp(min=0)
        by_label = -saved.label_posterior
        gradient.scatter_add_(1, label[:, None], by_label[:, None])
        if saved.duration_gradient is not None:
            gradient[:, self.tokens :] = saved.duration_gradient
        return gradient
