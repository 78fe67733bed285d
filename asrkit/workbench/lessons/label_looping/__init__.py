"""What notebook 06_label_looping measures and draws beyond its cells."""

from asrkit.workbench.lessons.label_looping.divergence import (
    states,
    waiting_share,
    waits_for,
    watch,
)
from asrkit.workbench.lessons.label_looping.figures import (
    pointer_jumping,
    waiting,
    waiting_legend,
    waits_matrix,
)

__all__ = [
    "pointer_jumping",
    "states",
    "waiting",
    "waiting_legend",
    "waiting_share",
    "waits_for",
    "waits_matrix",
    "watch",
]
