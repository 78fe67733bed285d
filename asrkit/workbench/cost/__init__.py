"""What models cost: operations and bytes counted (`counts`), and GPUs by their data sheets (`gpu`);
the money that transcription takes (`money`), and training on many GPUs (`scaling`).
"""

from asrkit.workbench.cost.counts import (
    GPU_TILE_BYTES,
    VARIANTS,
    Peak,
    encoder_flops,
    encoder_parameters,
    joint_bytes,
    largest_batch,
)
from asrkit.workbench.cost.gpu import CARDS, Card, LatencyCell, TwoNumbers, two_numbers

__all__ = [
    "CARDS",
    "GPU_TILE_BYTES",
    "VARIANTS",
    "Card",
    "LatencyCell",
    "Peak",
    "TwoNumbers",
    "encoder_flops",
    "encoder_parameters",
    "joint_bytes",
    "largest_batch",
    "two_numbers",
]
