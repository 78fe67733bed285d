"""What notebook 11_jasper measures and draws beyond its cells."""

from asrkit.workbench.lessons.jasper.figures import (
    dense_branches,
    latency_over_work,
    rate_over_batch,
    seed_dots,
    training_memory_bars,
)
from asrkit.workbench.lessons.jasper.studies import (
    batch_limits,
    chance_of_gain,
    expected_minimum,
    launches_of_call,
    masked_everywhere,
    narrowed,
    permutation_p,
    seed_runs,
    training_memory,
)

__all__ = [
    "batch_limits",
    "chance_of_gain",
    "dense_branches",
    "expected_minimum",
    "latency_over_work",
    "launches_of_call",
    "masked_everywhere",
    "narrowed",
    "permutation_p",
    "rate_over_batch",
    "seed_dots",
    "seed_runs",
    "training_memory",
    "training_memory_bars",
]
