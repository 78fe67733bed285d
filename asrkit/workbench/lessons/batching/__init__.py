"""What notebook 08_batching measures and draws beyond its cells."""

from asrkit.workbench.lessons.batching.figures import (
    epochs_over_batch,
    lengths_and_shares,
    loss_over_padded_speech,
    padding_over_spread,
    shuffling,
    utilisation_lines,
)
from asrkit.workbench.lessons.batching.studies import (
    compute_shares,
    drawn_padding,
    in_published_runs,
    log_spread,
    random_by_seconds,
    share_met_again,
    ways_to_batch,
)

__all__ = [
    "compute_shares",
    "drawn_padding",
    "epochs_over_batch",
    "in_published_runs",
    "lengths_and_shares",
    "log_spread",
    "loss_over_padded_speech",
    "padding_over_spread",
    "random_by_seconds",
    "share_met_again",
    "shuffling",
    "utilisation_lines",
    "ways_to_batch",
]
