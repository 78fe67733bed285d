"""What notebook 02_joint_memory measures and draws beyond its cells."""

from asrkit.workbench.lessons.joint_memory.figures import memory_over_batch, padded_lattices
from asrkit.workbench.lessons.joint_memory.variants import (
    VARIANTS,
    check_prediction,
    full_targets,
    gradient_error,
    joint_inputs,
    loss_of_zeros,
    peak_B,
    targets_of,
)

__all__ = [
    "VARIANTS",
    "check_prediction",
    "full_targets",
    "gradient_error",
    "joint_inputs",
    "loss_of_zeros",
    "memory_over_batch",
    "padded_lattices",
    "peak_B",
    "targets_of",
]
