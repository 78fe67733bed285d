"""What models and transcription cost.

`counts` has operations and bytes, `gpu` the data sheets of GPUs, `money` the price of transcription
at an RTFx of `rtfx`, and `scaling` the time to train on many GPUs.
"""

from asrkit.workbench.cost.counts import (
    GPU_TILE_BYTES,
    VARIANTS,
    encoder_flops,
    encoder_parameters,
    joint_bytes,
    largest_batch,
)
from asrkit.workbench.cost.gpu import CARDS, LatencyCell, two_numbers

__all__ = [
    "CARDS",
    "GPU_TILE_BYTES",
    "VARIANTS",
    "LatencyCell",
    "encoder_flops",
    "encoder_parameters",
    "joint_bytes",
    "largest_batch",
    "two_numbers",
]
