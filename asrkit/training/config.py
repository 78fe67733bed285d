"""Settings of a training run."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from asrkit.cpu import fast_dtype
from asrkit.data import AugmentConfig
from asrkit.features import FeatureConfig
from asrkit.runtime import usable_cores
from asrkit.shapes import expect, is_finite

Joint = Literal["auto", "full", "lean"]
JOINTS = ("auto", "full", "lean")
EVALUATE = ("in turn", "beside")
OPTIMIZERS = ("adamw", "lamb", "novograd")
PEAK_LR = {"adamw": 5e-3, "lamb": 1e-2, "novograd": 2e-2}  # where a config names none
CONFORMER_PEAK_LR = 2e-3  # likewise, of AdamW and a FastConformer
MOST_RATE = 1_000_000  # far above any that trains; float32 holds it, and its square
MOST_SMOOTHING = 0.5
PRECISIONS = ("auto", "float32", "bfloat16")


def check_smoothing(smoothing: float) -> None:
    """ValueError unless `smoothing` is a share that leaves the right token the likeliest."""
    valid = is_finite(smoothing) and 0 <= smoothing <= MOST_SMOOTHING
    expect(valid, "smoothing", f"a share from 0 to {MOST_SMOOTHING}", f"{smoothing!r:.40}")


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
        optimizer: "adamw"; "lamb" (`asrkit.optim.Lamb`) for large batches; or "novograd"
            (`asrkit.optim.NovoGrad`), by which Jasper was trained. LAMB's rate is the length of a
            step as a share of the weights' own, NovoGrad's is the length itself before momentum:
            neither compares with AdamW's.
        peak_lr: Highest learning rate; None for the optimizer's default, see `highest_rate`, and in
            `asrkit.training.train` for that of a FastConformer, which AdamW trains at a lower one.
        warmup: Share of the run in which the learning rate rises linearly.
        weight_decay: Weight decay of the optimizer.
        clip: Largest norm of the gradient; larger ones are scaled down. NovoGrad takes no notice:
            it divides the gradient of each weight tensor by its norm, whatever that is.
        ctc_weight: Weight of the CTC loss beside that of a transducer or of an attention decoder; 0
            leaves it out. A CTC model is trained by CTC alone, and takes no notice of this,
            `sigma`, `omega` and `joint`; an encoder-decoder model takes none of the last three.
        smoothing: Label smoothing of an attention decoder; see
            `asrkit.training.attention_loss`. Other models take no notice of it.
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
        evaluate: "in turn": training waits while the dev set is scored; "beside": a process of its
            own scores it meanwhile (`asrkit.training.Beside`), with as many threads more.
        threads: Threads that torch computes with on a machine; its processes share them out. By
            default half of the cores; the other half prepares batches.
        seed: Seed of weights, batches, augmentation and dropout.
        accumulate: Batches that each process takes in a step, one after the other. The loss is the
            mean over the labels of all batches of the step.

    Raises:
        ValueError: A value of the wrong type or out of range.
    """

    steps: int = 100_000
    seconds: float = 300.0
    batch_seconds: float = 12.0
    optimizer: Literal["adamw", "lamb", "novograd"] = "adamw"
    peak_lr: float | None = None
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 5.0
    ctc_weight: float = 0.3
    smoothing: float = 0.0
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
    evaluate: Literal["in turn", "beside"] = "in turn"
    threads: int = field(default_factory=_half_of_the_cores)
    seed: int = 0
    accumulate: int = 1

    def __post_init__(self) -> None:
        self._check_types()
        limits = (self.steps, self.seconds)
        expect(min(limits) > 0, "steps, seconds", "both > 0", limits)
        expect(self.batch_seconds > 0, "batch_seconds", "above 0", self.batch_seconds)
        expect(self.seed >= 0, "seed", "at least 0", self.seed)
        expect(self.threads >= 1, "threads", "at least 1", self.threads)
        expect(self.accumulate >= 1, "accumulate", "at least 1", self.accumulate)
        expect(0 <= self.warmup < 1, "warmup", "a share from 0 to below 1", self.warmup)
        expect(0 <= self.ema <= 1, "ema", "a share from 0 to 1", self.ema)
        check_smoothing(self.smoothing)
        expect(self.clip > 0, "clip", "above 0, math.inf for no limit", self.clip)
        expect(self.weight_decay >= 0, "weight_decay", "at least 0", self.weight_decay)
        rate_fits = self.peak_lr is None or self.peak_lr > 0
        expect(rate_fits, "peak_lr", "above 0, or None", self.peak_lr)
        chosen = (
            ("precision", PRECISIONS),
            ("joint", JOINTS),
            ("evaluate", EVALUATE),
            ("optimizer", OPTIMIZERS),
        )
        for name, choices in chosen:
            value = getattr(self, name)
            listed = ", ".join(map(repr, choices))
            expect(value in choices, name, f"one of {listed}", repr(value))

    def _check_types(self) -> None:
        """Raise ValueError for a field that has another type than its annotation.

        `expect_types` does not serve here: it refuses `seconds=math.inf`, which means no limit.
        """
        for name in ("steps", "threads", "seed", "accumulate"):
            value = getattr(self, name)
            number = isinstance(value, int) and not isinstance(value, bool)
            expect(number, name, "a whole number", repr(value))
        for name, kind in type(self).__annotations__.items():
            if kind is float:
                value = getattr(self, name)
                expect(_is_number(value), name, "a number", repr(value))
        fits = self.peak_lr is None or (is_finite(self.peak_lr) and self.peak_lr <= MOST_RATE)
        wanted = f"a number of at most {MOST_RATE:,}, or None"
        expect(fits, "peak_lr", wanted, repr(self.peak_lr))
        pair = isinstance(self.curriculum, tuple | list) and len(self.curriculum) == 2
        numbers = pair and all(_is_number(value) for value in self.curriculum)
        expect(numbers, "curriculum", "a pair (seconds, share)", repr(self.curriculum))
        for name, class_ in (("features", FeatureConfig), ("augment", AugmentConfig)):
            value = getattr(self, name)
            expect(isinstance(value, class_), name, class_.__name__, repr(value))

    @property
    def highest_rate(self) -> float:
        """`peak_lr`, or where that is None the default of the optimizer."""
        if self.peak_lr is None:
            return PEAK_LR[self.optimizer]
        return self.peak_lr

    def learning_rate(self, progress: float) -> float:
        """Learning rate at `progress` in 0..1: linear warm-up, then a half cosine to zero."""
        if progress < self.warmup:
            return self.highest_rate * (progress + 1e-3) / (self.warmup + 1e-3)
        after_warmup = (progress - self.warmup) / (1 - self.warmup)
        done = min(1.0, after_warmup)
        return self.highest_rate * 0.5 * (1 + math.cos(math.pi * done))

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
        if device.type != "cuda":
            return getattr(torch, fast_dtype())
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return torch.float32


def _is_number(value: object) -> bool:
    """Whether `value` is an int or a float other than NaN; infinity is, a bool is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not math.isnan(value)
