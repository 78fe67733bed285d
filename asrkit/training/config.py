"""Settings of a training run."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from asrkit.data import AugmentConfig
from asrkit.features import FeatureConfig
from asrkit.runtime import usable_cores
from asrkit.shapes import expect

Joint = Literal["auto", "full", "lean"]
JOINTS = ("auto", "full", "lean")
PRECISIONS = ("auto", "float32", "bfloat16")


def _half_of_the_cores() -> int:
    return max(1, usable_cores() // 2)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The run ends after `steps` steps or `seconds`, whichever comes first.

    Args:
        steps: Optimizer steps at most.
        seconds: Training time at most, in seconds; math.inf for no limit.
        batch_seconds: Audio of a batch at most, in seconds. Small by default: on a CPU the number
            of steps decides, not their size.
        peak_lr: Highest learning rate.
        warmup: Share of the run in which the learning rate rises linearly.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of the gradient; larger ones are scaled down.
        ctc_weight: Weight of the auxiliary CTC loss; 0 leaves it out.
        sigma: Logit under-normalisation of TDT, in nats; see `asrkit.losses.tdt_loss`.
        omega: Share of steps in which TDT takes the RNN-T loss; see `asrkit.losses.tdt_loss`.
        ema: Decay of the averaged weights, which are the ones exported.
        curriculum: Longest utterance at the start, in seconds, and the share of the run after
            which all lengths are admitted.
        precision: Autocast dtype of the model; "auto" is bfloat16 where the hardware computes in
            it, else float32.
        joint: "full" builds the joint's logits (B, T, U1, V); "lean" computes the loss from its
            two halves, tile by tile; "auto" chooses for each batch by
            `asrkit.training.joint.chooses_lean`.
        features: Log-mel settings.
        augment: Augmentation of the training speech.
        checkpoint_s: Training time between two checkpoints, in seconds.
        evaluate_s: Training time between two evaluations of the dev set, in seconds.
        threads: Threads that torch computes with. By default half of the cores; the other half
            prepares batches.
        seed: Seed of weights, batches, augmentation and dropout.

    Raises:
        ValueError: A value of the wrong type or out of range.
    """

    steps: int = 100_000
    seconds: float = 300.0
    batch_seconds: float = 12.0
    peak_lr: float = 5e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 5.0
    ctc_weight: float = 0.3
    sigma: float = 0.05
    omega: float = 0.1
    ema: float = 0.998
    curriculum: tuple[float, float] = (2.5, 0.2)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    joint: Joint = "auto"
    features: FeatureConfig = field(default_factory=FeatureConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    checkpoint_s: float = 30.0
    evaluate_s: float = 60.0
    threads: int = field(default_factory=_half_of_the_cores)
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        limits = (self.steps, self.seconds)
        expect(min(limits) > 0, "steps, seconds", "both > 0", limits)
        expect(self.batch_seconds > 0, "batch_seconds", "above 0", self.batch_seconds)
        expect(self.seed >= 0, "seed", "at least 0", self.seed)
        expect(self.threads >= 1, "threads", "at least 1", self.threads)
        expect(0 <= self.warmup < 1, "warmup", "a share from 0 to below 1", self.warmup)
        expect(0 <= self.ema <= 1, "ema", "a share from 0 to 1", self.ema)
        for name, choices in (("precision", PRECISIONS), ("joint", JOINTS)):
            value = getattr(self, name)
            listed = ", ".join(map(repr, choices))
            expect(value in choices, name, f"one of {listed}", repr(value))

    def _check_types(self) -> None:
        """Raise ValueError for a field that has another type than its annotation.

        `expect_types` does not serve here: it refuses `seconds=math.inf`, which means no limit.
        """
        for name in ("steps", "threads", "seed"):
            value = getattr(self, name)
            number = isinstance(value, int) and not isinstance(value, bool)
            expect(number, name, "a whole number", repr(value))
        for name, kind in type(self).__annotations__.items():
            if kind is float:
                value = getattr(self, name)
                expect(_is_number(value), name, "a number", repr(value))
        pair = isinstance(self.curriculum, tuple | list) and len(self.curriculum) == 2
        numbers = pair and all(_is_number(value) for value in self.curriculum)
        expect(numbers, "curriculum", "a pair (seconds, share)", repr(self.curriculum))
        for name, wanted in (("features", FeatureConfig), ("augment", AugmentConfig)):
            value = getattr(self, name)
            expect(isinstance(value, wanted), name, wanted.__name__, repr(value))

    def learning_rate(self, progress: float) -> float:
        """Learning rate at `progress` in 0..1: linear warm-up, then a half cosine to zero."""
        if progress < self.warmup:
            return self.peak_lr * (progress + 1e-3) / (self.warmup + 1e-3)
        after_warmup = (progress - self.warmup) / (1 - self.warmup)
        done = min(1.0, after_warmup)
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * done))

    def longest_s(self, progress: float) -> float:
        """Longest utterance that the length curriculum admits at `progress` in 0..1, in seconds."""
        start_s, until = self.curriculum
        if progress >= until:
            return math.inf
        return start_s * (1 + 3 * progress / until)

    def dtype(self, device: torch.device) -> torch.dtype:
        """Autocast dtype of the model: bfloat16 where the hardware computes in it, else float32."""
        if self.precision != "auto":
            return getattr(torch, self.precision)
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = torch.cpu._is_avx512_bf16_supported()
        if fast:
            return torch.bfloat16
        return torch.float32


def _is_number(value: object) -> bool:
    """Whether `value` is an int or a float other than NaN; infinity is, a bool is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not math.isnan(value)
