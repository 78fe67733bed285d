"""The peer: torchaudio's compiled loss behind our signature."""

import torch
import torchaudio
from torch import Tensor

from asrkit.losses.nodes import LatticeOptions, Nodes


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments. Memory: 2 B T U1 V."""
    lengths = nodes.table[:, :2]
    T, U = lengths.amax(0).tolist()  # it refuses tensors longer than their longest utterance
    sizes = [column.contiguous() for column in lengths.to(logits.device, torch.int32).unbind(1)]
    given = logits[:, :T, : U + 1].contiguous(), targets[:, :U].int().contiguous(), *sizes
    costs = torchaudio.functional.rnnt_loss(
        *given, options.blank, options.clamp, "none", options.fused_log_softmax
    )
    return costs.to(torch.promote_types(costs.dtype, torch.float32))
