"""What notebook 03_loss_kernels measures and draws beyond its cells."""

from asrkit.workbench.lessons.loss_kernels.figures import (
    emissions,
    rounding_error_lines,
    time_over_memory,
    tokens_over_penalty,
)
from asrkit.workbench.lessons.loss_kernels.lattices import arcs, diagonal, nodes_at_once, tdt_arcs
from asrkit.workbench.lessons.loss_kernels.studies import (
    DESCENT_STEPS,
    IN_FORMAT,
    expected_frames,
    expected_tokens,
    label_posteriors_after_descent,
    nats_lost_in_band,
    rounding_errors,
)
from asrkit.workbench.lessons.loss_kernels.versions import (
    PHASES,
    joint_leaves,
    joint_versions,
    loss_and_gradient,
    phase_arms,
    random_lattices,
)

__all__ = [
    "DESCENT_STEPS",
    "IN_FORMAT",
    "PHASES",
    "arcs",
    "diagonal",
    "emissions",
    "expected_frames",
    "expected_tokens",
    "joint_leaves",
    "joint_versions",
    "label_posteriors_after_descent",
    "loss_and_gradient",
    "nats_lost_in_band",
    "nodes_at_once",
    "phase_arms",
    "random_lattices",
    "rounding_error_lines",
    "rounding_errors",
    "tdt_arcs",
    "time_over_memory",
    "tokens_over_penalty",
]
