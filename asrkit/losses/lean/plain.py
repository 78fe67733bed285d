"""The joint's tiles in plain torch: any device, any floating type, matrix products by the library. The one to read."""

import torch
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.lean.driver import Joint
from asrkit.losses.nodes import FIRST_NODE, LABELS, Nodes, Options, Scores


class Tiles:
    """asrkit.losses.lean.driver.Tiles; sums of gradients in float32 or better."""

    def __init__(
        self, encoded: Tensor, predicted: Tensor, weight: Tensor, bias: Tensor, targets: Tensor,
        nodes: Nodes, options: Options, joint: Joint,
    ) -> None:  # fmt: skip
        self.encoded, self.predicted, self.weight, self.bias = (x.detach() for x in (encoded, predicted, weight, bias))
        self.T, self.U1, self.D = encoded.shape[1], predicted.shape[1], encoded.shape[2]
        self.targets, self.options, self.joint = targets, options, joint
        self.table, self.tokens = nodes.table.to(encoded.device), len(weight) - len(options.durations)
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.sums: tuple[Tensor, ...] = ()

    def scores(self, first: int, last: int, scores: Scores) -> None:
        """Write the scores of nodes first..last-1 into `scores`."""
        _, logits, label = self._logits(torch.arange(first, last, device=self.weight.device))
        tokens, where = logits[:, : self.tokens], slice(first, last)
        z = torch.logsumexp(tokens, -1, out=scores.z[where])
        torch.sub(tokens[:, self.options.blank], z, out=scores.stay[where])
        at_label = tokens.gather(1, label.clamp(min=0)[:, None])[:, 0] - z
        scores.emit[where] = at_label.masked_fill(label < 0, -torch.inf)
        if scores.durations is not None:
            scores.durations[where] = logits[:, self.tokens :].log_softmax(-1)

    def accumulate(self, index: Tensor, z: Tensor, by_blank: Tensor, by_label: Tensor, durations: Tensor | None) -> None:
        """Add what the nodes `index` contribute to the gradients."""
        (rows, hidden, slope), logits, label = self._logits(index)
        grad = logits.sub_(z[:, None]).exp_().mul_((by_blank + by_label)[:, None])
        grad[:, self.options.blank] -= by_blank
        grad.scatter_add_(1, label.clamp(min=0)[:, None], -by_label[:, None])  # by_label is 0 where no label is left
        if durations is not None:
            grad[:, self.tokens :] = durations
        low, (by_encoded, by_predicted, by_weight, by_bias) = grad.to(self.weight.dtype), self._sums()
        by_hidden = (low @ self.weight).to(self.dtype).mul_(slope)
        by_encoded.view(-1, self.D).index_add_(0, rows[0], by_hidden)
        by_predicted.view(-1, self.D).index_add_(0, rows[1], by_hidden)
        by_weight += low.T @ hidden
        by_bias += grad.sum(0)

    def gradients(self) -> tuple[Tensor, ...]:
        """Sums by encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,)."""
        return self._sums()

    def _sums(self) -> tuple[Tensor, ...]:
        given = self.encoded, self.predicted, self.weight, self.bias
        self.sums = self.sums or tuple(torch.zeros(x.shape, dtype=self.dtype, device=x.device) for x in given)
        return self.sums

    def _logits(self, index: Tensor) -> tuple[tuple[tuple[Tensor, Tensor], Tensor, Tensor], Tensor, Tensor]:
        """Of nodes (n,): rows of both halves, hidden layer and its derivative (n, D); logits (n, V); next label or -1."""
        b = torch.searchsorted(self.table[:, FIRST_NODE].contiguous(), index, right=True) - 1
        width, place = self.table[b, LABELS] + 1, index - self.table[b, FIRST_NODE]
        t, u = place // width, place % width
        rows = b * self.T + t, b * self.U1 + u
        total = self.encoded.reshape(-1, self.D)[rows[0]] + self.predicted.reshape(-1, self.D)[rows[1]]
        hidden = total.tanh() if self.joint.activation == "tanh" else total.relu()
        slope = (1 - hidden * hidden if self.joint.activation == "tanh" else (total > 0)).to(self.dtype)
        if self.joint.dropout:
            keys = dropout.node_keys(b, t, u, self.joint.seed)
            keep = dropout.mask(keys, self.D, self.joint.dropout) / (1 - self.joint.dropout)
            hidden, slope = hidden * keep, slope * keep
        label = torch.where(u + 1 < width, self.targets[b, u.clamp(max=max(0, self.U1 - 2))] if self.U1 > 1 else -1, -1)
        hidden = hidden.to(self.weight.dtype)
        return (rows, hidden, slope), (hidden @ self.weight.T).to(self.dtype) + self.bias, label
