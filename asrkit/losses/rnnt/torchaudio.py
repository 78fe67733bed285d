"""The peer: torchaudio's compiled loss behind our signature."""

import torch
import torchaudio
from torch import Tensor

from asrkit.losses.nodes import LatticeOptions, Nodes


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options.

    Memory: 2 B T U1 V.
    """
    lengths = nodes.table[:, :2]
    T, U = lengths.amax(0).tolist()  # it refuses tensors longer than their longest utterance
    frames, labels = lengths.to(logits.device, torch.int32).unbind(1)
    costs = torchaudio.functional.rnnt_loss(
        logits[:, :T, : U + 1].contiguous(),
        targets[:, :U].int().contiguous(),
        frames.contiguous(),
        labels.contiguous(),
        options.blank,
        options.clamp,
        "none",
        options.fused_log_softmax,
    )
    return costs.to(torch.promote_types(costs.dtype, torch.float32))
