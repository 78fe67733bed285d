"""Speech to train and test with: corpora, batches and what they pad, samplers for lhotse's cuts, and augmentation."""

from typing import TYPE_CHECKING, Any

from asrkit.data.accounts import (
    CANARY_COMPUTE,
    CANARY_MEMORY,
    Account,
    Cost,
    Limit,
    at_most_seconds,
    at_most_utterances,
    attention,
    linear,
    padding_account,
    transducer_joint,
)  # fmt: skip
from asrkit.data.augment import AugmentConfig, augment, spec_augment
from asrkit.data.batching import Batch, Utterances, batches, training_stream
from asrkit.data.buckets import Buckets, buckets_1d, buckets_2d, duration_bins
from asrkit.data.lengths import Lengths, shipped_lengths, web_like
from asrkit.data.oom import OOMResult, memory_model, oom_search
from asrkit.data.planning import Balanced, Bucketed, Plan, Random, Sorted, plan

if TYPE_CHECKING:
    from asrkit.data.sampler import LengthSampler

__all__ = [
    "CANARY_COMPUTE", "CANARY_MEMORY", "Account", "AugmentConfig", "Balanced", "Batch", "Bucketed", "Buckets", "Cost",
    "LengthSampler", "Lengths", "Limit", "OOMResult", "Plan", "Random", "Sorted", "Utterances", "at_most_seconds",
    "at_most_utterances", "attention", "augment", "batches", "buckets_1d", "buckets_2d", "duration_bins", "linear",
    "memory_model", "oom_search", "padding_account", "plan", "shipped_lengths", "spec_augment", "training_stream",
    "transducer_joint", "web_like",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "LengthSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asrkit.data.sampler import LengthSampler  # here: plans and accounts serve machines without lhotse

    return LengthSampler
