"""Speech to train and test with: corpora, augmentation, batches and their padding.

`LengthSampler`, which needs lhotse, is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from asrkit.data.augment import UNALTERED, AugmentConfig, augment, spec_augment, warp_features
from asrkit.data.batching.buckets import (
    Buckets,
    buckets_1d,
    buckets_2d,
    duration_bins,
    usual_rates,
)
from asrkit.data.batching.lengths import Lengths, shipped_lengths, web_like
from asrkit.data.batching.oom import OOMResult, oom_search
from asrkit.data.batching.padding import (
    CANARY_COMPUTE,
    CANARY_MEMORY,
    Account,
    Cost,
    Limit,
    at_most_seconds,
    at_most_utterances,
    attention,
    computed_seconds,
    linear,
    padding_account,
    transducer_joint,
)
from asrkit.data.batching.presorting import Presorted
from asrkit.data.batching.strategies import Balanced, Bucketed, Plan, Random, Sorted, plan
from asrkit.data.recordings import RecordedSpeech, recorded_speech
from asrkit.data.utterances import Batch, Utterances, batches

if TYPE_CHECKING:
    from asrkit.data.batching.sampler import LengthSampler

__all__ = [
    "CANARY_COMPUTE",
    "CANARY_MEMORY",
    "UNALTERED",
    "Account",
    "AugmentConfig",
    "Balanced",
    "Batch",
    "Bucketed",
    "Buckets",
    "Cost",
    "LengthSampler",
    "Lengths",
    "Limit",
    "OOMResult",
    "Plan",
    "Presorted",
    "Random",
    "RecordedSpeech",
    "Sorted",
    "Utterances",
    "at_most_seconds",
    "at_most_utterances",
    "attention",
    "augment",
    "batches",
    "buckets_1d",
    "buckets_2d",
    "computed_seconds",
    "duration_bins",
    "linear",
    "oom_search",
    "padding_account",
    "plan",
    "recorded_speech",
    "shipped_lengths",
    "spec_augment",
    "transducer_joint",
    "usual_rates",
    "warp_features",
    "web_like",
]


def __getattr__(name: str) -> Any:
    """Import LengthSampler on first use."""
    if name != "LengthSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asrkit.data.batching.sampler import LengthSampler

    return LengthSampler
