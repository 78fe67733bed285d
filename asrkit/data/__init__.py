"""Speech to train and test with: corpora, batches within a budget of padded seconds, and augmentation."""

from asrkit.data.augment import AugmentConfig, augment, spec_augment
from asrkit.data.batching import Batch, Utterances, batches, training_stream

__all__ = ["AugmentConfig", "Batch", "Utterances", "augment", "batches", "spec_augment", "training_stream"]
