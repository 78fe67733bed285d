"""What notebook 10_mlperf_rnnt measures and draws beyond its cells."""

from asrkit.workbench.lessons.mlperf_rnnt.figures import (
    epochs_and_critical_batch,
    minutes_over_gpus,
)
from asrkit.workbench.lessons.mlperf_rnnt.halo import split_convolution
from asrkit.workbench.lessons.mlperf_rnnt.phases import phased_batch, rank_work
from asrkit.workbench.lessons.mlperf_rnnt.studies import (
    EvaluatedTraining,
    mean_of_means_error,
    prepared_batches,
    train_in_processes,
    train_with_lamb,
)

__all__ = [
    "EvaluatedTraining",
    "epochs_and_critical_batch",
    "mean_of_means_error",
    "minutes_over_gpus",
    "phased_batch",
    "prepared_batches",
    "rank_work",
    "split_convolution",
    "train_in_processes",
    "train_with_lamb",
]
