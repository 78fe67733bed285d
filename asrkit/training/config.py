"""Settings of a training run, and its schedule: learning rate and lengths over the run."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from asrkit.cpu import fast_dtype
from asrkit.data import AugmentConfig
from asrkit.features import FeatureConfig
from asrkit.models import FastConformerConfig
from asrkit.shapes import expect_types
from asrkit.threads import usable_cores
from asrkit.training.options import TrainOptions
from asrkit.transcribe.options import expect_all

PEAK_LR = {"adamw": 5e-3, "lamb": 1e-2, "novograd": 2e-2}  # where a config names none
SEEDS = 2**40  # torch takes 64 bits, and `step_seed` makes a million seeds of each
CONFORMER_PEAK_LR = 2e-3  # likewise, of AdamW and a FastConformer


def _half_of_the_cores() -> int:
    return max(1, usable_cores() // 2)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """How to train: the options of the command, and what only Python sets.

    The run ends after `steps` steps or `seconds`, whichever comes first; math.inf is no limit.
    LAMB's rate is the length of a step as a share of the weights' own, NovoGrad's is the length
    itself before momentum: neither compares with AdamW's.

    Args:
        batch_seconds: Audio of a batch at most, in seconds. Small by default: on a CPU the number
            of steps decides, not their size.
        warmup: Share of the run in which the learning rate rises linearly.
        weight_decay: Weight decay of the optimizer.
        clip: Largest norm of the gradient; larger ones are scaled down. NovoGrad takes no notice:
            it divides the gradient of each weight tensor by its norm, whatever that is.
        ctc_weight: Weight of the CTC loss beside that of a transducer or of an attention decoder; 0
            leaves it out. A CTC model is trained by CTC alone, and takes no notice of this,
            `sigma`, `omega` and `joint`; an encoder-decoder model takes none of the last three.
        sigma: Logit under-normalisation of TDT, in nats; see `asrkit.losses.tdt_loss`.
        omega: Share of steps in which TDT takes the RNN-T loss; see `asrkit.losses.tdt_loss`.
        ema: Decay of the averaged weights, which are the ones exported.
        curriculum: Longest utterance at the start, in seconds, and the share of the run after
            which all lengths are admitted.
        precision: Autocast dtype of the model; "auto" is bfloat16 where the hardware computes in
            it, else float32.
        features: Log-mel settings.
        augment: Augmentation of the training speech.
        evaluate_s: Training time between two evaluations of the dev set, in seconds.
        threads: Threads that torch computes with on a machine; its processes share them out. By
            default half of the cores; the other half prepares batches.

    Raises:
        ValueError: A value of the wrong type or out of range.
    """

    batch_seconds: float = 12.0
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float | int = 5.0  # infinity too
    ctc_weight: float = 0.3
    sigma: float = 0.05
    omega: float = 0.1
    ema: float = 0.998
    curriculum: tuple[float, float] = (2.5, 0.2)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    features: FeatureConfig = field(default_factory=FeatureConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    evaluate_s: float = 60.0
    threads: int = field(default_factory=_half_of_the_cores)

    def __post_init__(self) -> None:
        expect_types(self)
        expect_all(
            self,
            steps=(self.steps >= 1, "at least 1"),
            seconds=(self.seconds > 0, "above 0, math.inf for no limit"),
            batch_seconds=(self.batch_seconds > 0, "above 0"),
            peak_lr=(self.peak_lr is None or self.peak_lr > 0, "above 0, or None"),
            warmup=(0 <= self.warmup < 1, "a share from 0 to below 1"),
            weight_decay=(self.weight_decay >= 0, "at least 0"),
            clip=(self.clip > 0, "above 0, math.inf for no limit"),
            ctc_weight=(self.ctc_weight >= 0, "at least 0"),
            omega=(0 <= self.omega <= 1, "a share from 0 to 1"),
            smoothing=(0 <= self.smoothing <= 0.5, "a share from 0 to 0.5"),
            ema=(0 <= self.ema <= 1, "a share from 0 to 1"),
            curriculum=(min(self.curriculum) >= 0, "a pair (seconds, share), both at least 0"),
            evaluate_s=(self.evaluate_s >= 0, "at least 0"),
            checkpoint_s=(self.checkpoint_s >= 0, "at least 0"),
            threads=(self.threads >= 1, "at least 1"),
            seed=(0 <= self.seed < SEEDS, f"from 0 to below {SEEDS}"),
            accumulate=(self.accumulate >= 1, "at least 1"),
        )

    def learning_rate(self, progress: float) -> float:
        """Learning rate at `progress` in 0..1: linear warm-up, then a half cosine to zero."""
        assert self.peak_lr is not None, "`train` names one"
        if progress < self.warmup:
            return self.peak_lr * (progress + 1e-3) / (self.warmup + 1e-3)
        done = min(1.0, (progress - self.warmup) / (1 - self.warmup))
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * done))

    def longest_s(self, progress: float) -> float:
        """Longest utterance that the length curriculum admits at `progress` in 0..1, in seconds."""
        start_s, until = self.curriculum
        if progress >= until:
            return math.inf
        return start_s * (1 + 3 * progress / until)

    def dtype(self, device: torch.device) -> torch.dtype:
        """Autocast dtype of the model: bfloat16 where the hardware computes in it, else float32."""
        precision = self.precision
        if precision == "auto":
            return getattr(torch, fast_dtype(device.type))
        return getattr(torch, precision)


def usual_rate(optimizer: str, encoder: object) -> float:
    """Highest learning rate of a run that names none: 0.005 for AdamW, but 0.002 for it and a
    FastConformer, 0.01 for LAMB, 0.02 for NovoGrad.

    Args:
        optimizer: As in `TrainConfig`.
        encoder: Config of the model's encoder.
    """
    if optimizer == "adamw" and isinstance(encoder, FastConformerConfig):
        return CONFORMER_PEAK_LR
    return PEAK_LR[optimizer]


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Settings of `after` that are others in `before`, as "seed 0 -> 1; joint auto -> full"."""
    old = _flat(before)
    changed = []
    for name, value in _flat(after).items():
        if old.get(name) != value:
            changed.append(f"{name} {old.get(name)!s:.40} -> {value!s:.40}")
    return "; ".join(changed)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, without dicts inside."""
    flat = dict[str, Any]()
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": part for inner, part in _flat(value).items()}
        else:
            flat[name] = value
    return flat
