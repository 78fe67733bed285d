"""The learning rate and the longest utterance over a run, and the default peaks of the rate.

Importing this file needs no torch: the help of `asrkit train` prints the peaks.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asrkit.training.config import TrainConfig

PEAK_LR = {"adamw": 0.005, "lamb": 0.01, "novograd": 0.02}
CONFORMER_PEAK_LR = 0.002  # of AdamW and a FastConformer


def default_peak_lr(optimizer: str, *, fastconformer: bool) -> float:
    """Highest learning rate of a run whose config names none.

    Args:
        optimizer: A key of `PEAK_LR`.
        fastconformer: Whether the model's encoder is one. AdamW then takes a lower rate.
    """
    if fastconformer and optimizer == "adamw":
        return CONFORMER_PEAK_LR
    return PEAK_LR[optimizer]


def learning_rate(config: "TrainConfig", progress: float) -> float:
    """Learning rate at `progress` in 0..1: linear warm-up, then a half cosine to zero."""
    assert config.peak_lr is not None, "`train` fills it in"
    if progress < config.warmup:
        return config.peak_lr * (progress + 1e-3) / (config.warmup + 1e-3)
    done = min(1.0, (progress - config.warmup) / (1 - config.warmup))
    return config.peak_lr * 0.5 * (1 + math.cos(math.pi * done))


def longest_utterance_s(config: "TrainConfig", progress: float) -> float:
    """Longest utterance that the length curriculum admits at `progress` in 0..1, in seconds."""
    start_s, until = config.curriculum
    if progress >= until:
        return math.inf
    return start_s * (1 + 3 * progress / until)
