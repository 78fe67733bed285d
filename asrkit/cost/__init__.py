"""What models cost: bytes and operations, counted (`counts`)."""

from asrkit.cost.counts import (
    CARDS,
    VARIANTS,
    Card,
    Peak,
    encoder_flops,
    encoder_parameters,
    joint_bytes,
    joint_flops,
    largest_batch,
)

__all__ = [
    "CARDS",
    "VARIANTS",
    "Card",
    "Peak",
    "encoder_flops",
    "encoder_parameters",
    "joint_bytes",
    "joint_flops",
    "largest_batch",
]
