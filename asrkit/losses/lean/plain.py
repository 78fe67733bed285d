"""The joint's tiles in plain torch: any device, any floating type, matrix products by the library.
The one to read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.lean.driver import Joint, NodeTiles
from asrkit.losses.nodes import FIRST_NODE, LABELS, ArcLogProbs, LatticeOptions, Nodes


class Where(NamedTuple):
    """Of nodes (n,): rows of encoded and predicted, the next label or -1, and the key of dropout's
    mask.
    """

    encoded: Tensor
    predicted: Tensor
    label: Tensor
    keys: Tensor


class Tiles(NodeTiles):
    """asrkit.losses.lean.driver.Tiles; sums of gradients in float32 or better."""

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
        self.T, self.U1, self.D = encoded.shape[1], predicted.shape[1], encoded.shape[2]
        self.halves = [
            half.detach().reshape(-1, self.D).contiguous() for half in (encoded, predicted)
        ]  # (B T, D), (B U1, D)
        self.weight, self.shapes = (
            weight.detach(),
            (encoded.shape, predicted.shape, weight.shape, bias.shape),
        )
        self.targets, self.nodes, self.options, self.joint = targets, nodes, options, joint
        self.table, self.tokens = nodes.on(encoded.device), len(weight) - len(options.durations)
        self.first = self.table[:, FIRST_NODE].contiguous()
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.bias = bias.detach().to(self.dtype).contiguous()
        self.sums: tuple[Tensor, ...] = ()

    def score(self, first: int, last: int, scores: ArcLogProbs) -> None:
        """Write the scores of nodes first..last-1 into `scores`."""
        where, to = (
            self.locate(torch.arange(first, last, device=self.weight.device)),
            slice(first, last),
        )
        logits = self._logits(self._hidden(where)[0])
        tokens = logits[:, : self.tokens]
        z = torch.logsumexp(tokens, -1, out=scores.log_z[to])
        z.masked_fill_(
            z.isinf(), torch.nan
        )  # as in asrkit.losses.logit_rows.plain: overflow is no missing path
        torch.sub(tokens[:, self.options.blank], z, out=scores.blank_logp[to])
        at_label = tokens.gather(1, where.label.clamp(min=0)[:, None])[:, 0] - z
        scores.label_logp[to] = at_label.masked_fill(where.label < 0, -torch.inf)
        if scores.duration_logp is not None:
            scores.duration_logp[to] = logits[:, self.tokens :].log_softmax(-1)

    def accumulate(
        self,
        index: Tensor,
        z: Tensor,
        blank_posterior: Tensor,
        label_posterior: Tensor,
        durations: Tensor | None,
    ) -> None:
        """Add what the nodes `index` contribute to the gradients."""
        where = self.locate(index)
        hidden, slope = self._hidden(where)
        grad = (
            self._logits(hidden)
            .sub_(z[:, None])
            .exp_()
            .mul_((blank_posterior + label_posterior)[:, None])
        )
        grad[:, self.options.blank] -= blank_posterior
        grad.scatter_add_(
            1, where.label.clamp(min=0)[:, None], -label_posterior[:, None]
        )  # 0 where no label is left
        if durations is not None:
            grad[:, self.tokens :] = durations
        low, (by_encoded, by_predicted, by_weight, by_bias) = (
            grad.to(self.weight.dtype),
            self.totals(),
        )
        by_hidden = (low @ self.weight).to(self.dtype).mul_(slope)
        by_encoded.view(-1, self.D).index_add_(0, where.encoded, by_hidden)
        by_predicted.view(-1, self.D).index_add_(0, where.predicted, by_hidden)
        by_weight += low.T @ hidden
        by_bias += grad.sum(0)

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, zeros at first."""
        self.sums = self.sums or tuple(
            torch.zeros(size, dtype=self.dtype, device=self.weight.device) for size in self.shapes
        )
        return self.sums

    def locate(self, index: Tensor) -> Where:
        """Where nodes (n,) take their hidden layer and their label from."""
        b = torch.searchsorted(self.first, index, right=True) - 1
        width, place = self.table[b, LABELS] + 1, index - self.first[b]
        t, u = place // width, place % width
        label = (
            torch.full_like(u, -1) if self.U1 == 1 else self.targets[b, u.clamp(max=self.U1 - 2)]
        )
        keys = dropout.node_keys(b, t, u, self.joint.seed) if self.joint.dropout else u
        return Where(b * self.T + t, b * self.U1 + u, label.where(u + 1 < width, -1), keys)

    def _hidden(self, where: Where) -> tuple[Tensor, Tensor]:
        """Hidden layer and its derivative by the sum of both halves, (n, D) each."""
        total = torch.add(*(half[row] for half, row in zip(self.halves, where[:2], strict=True)))
        hidden = total.tanh() if self.joint.activation == "tanh" else total.relu()
        slope = (1 - hidden * hidden if self.joint.activation == "tanh" else (total > 0)).to(
            self.dtype
        )
        if self.joint.dropout:
            keep = dropout.mask(where.keys, self.D, self.joint.dropout).to(self.dtype) / (
                1 - self.joint.dropout
            )
            hidden, slope = hidden * keep, slope * keep
        return hidden.to(self.weight.dtype), slope

    def _logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.weight.T).to(self.dtype) + self.bias
