"""What notebook 05_batched_ctc_frontend measures and draws beyond its cells."""

from asrkit.workbench.lessons.batched_ctc_frontend.figures import (
    amdahl,
    ctc_runs,
    gain_over_speed,
    launches_and_waits,
    ms_per_utterance,
)
from asrkit.workbench.lessons.batched_ctc_frontend.steps import (
    LOOPED_STEPS,
    noise_batch,
    random_scores,
    recogniser_for,
    share_needed,
    step_arms,
    step_ms,
    with_nan_padding,
)

__all__ = [
    "LOOPED_STEPS",
    "amdahl",
    "ctc_runs",
    "gain_over_speed",
    "launches_and_waits",
    "ms_per_utterance",
    "noise_batch",
    "random_scores",
    "recogniser_for",
    "share_needed",
    "step_arms",
    "step_ms",
    "with_nan_padding",
]
