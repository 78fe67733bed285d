"""Settings of a training run. The learning rate over the run is in `schedule.py`."""

from dataclasses import dataclass, field
from typing import Any

import torch

from asrkit.cpu import fast_dtype
from asrkit.data import AugmentConfig
from asrkit.features import FeatureConfig
from asrkit.shapes import expect_types
from asrkit.threads import usable_cores
from asrkit.training.options import TrainOptions
from asrkit.transcribe.options import expect_all

SEEDS = 2**40  # torch takes 64 bits, and `batch_seed` makes a million seeds of each


def _half_of_the_cores() -> int:
    return max(1, usable_cores() // 2)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """How to train: the options of `asrkit train`, and further settings for Python.

    The run ends after `steps` steps or `seconds`, whichever comes first; math.inf is no limit.
    Learning rates of the optimizers do not compare. LAMB's is the length of a step relative to the
    length of the weights; NovoGrad's is the length of a step before momentum.

    Args:
        warmup: Share of the run in which the learning rate rises linearly.
        weight_decay: Weight decay of the optimizer.
        clip: Largest norm of the gradient; larger ones are scaled down. NovoGrad ignores it: it
            divides the gradient of each weight tensor by its norm.
        ctc_weight: Weight of the auxiliary CTC loss of a transducer or an attention decoder; 0
            omits it. A CTC model is trained by CTC alone, and ignores this, `sigma`, `omega` and
            `joint`; an encoder-decoder model ignores the last three.
        sigma: Logit under-normalisation of TDT, in nats; see `asrkit.losses.tdt_loss`.
        omega: Share of steps in which TDT takes the RNN-T loss; see `asrkit.losses.tdt_loss`.
        ema: Decay of the averaged weights, which are the exported ones.
        curriculum: Longest utterance at the start, in seconds, and the share of the run after
            which all lengths are admitted.
        features: Log-mel settings.
        augment: Augmentation of the training speech.
        evaluate_s: Training time between two evaluations of the dev set, in seconds.
        threads: Threads that torch computes with on a machine, shared by its processes. By default
            half of the cores; the other half prepares batches.

    Raises:
        ValueError: A value of the wrong type or out of range.
    """

    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float | int = 5.0  # may be infinity
    ctc_weight: float = 0.3
    sigma: float = 0.05
    omega: float = 0.1
    ema: float = 0.998
    curriculum: tuple[float, float] = (2.5, 0.2)
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
            buckets=(self.buckets >= 1, "at least 1"),
            batch_seconds=(self.batch_seconds > 0, "above 0"),
            memory=(self.memory is None or self.memory > 0, "above 0"),
            bucket_sizes=(self.bucket_sizes is None or self.memory is None, "none with --memory"),
            tokens_per_second=(
                self.tokens_per_second is None or self.tokens_per_second > 0,
                "above 0",
            ),
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

    def dtype(self, device: torch.device) -> torch.dtype:
        """Autocast dtype of the model; see `precision`."""
        auto = self.precision == "auto"
        return getattr(torch, fast_dtype(device.type) if auto else self.precision)


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Settings that differ between two runs, as "seed 0 -> 1; joint auto -> full"."""
    old = _flat(before)
    changed = []
    for name, value in _flat(after).items():
        if old.get(name) != value:
            changed.append(f"{name} {old.get(name)!s:.40} -> {value!s:.40}")
    return "; ".join(changed)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, without nested dicts."""
    flat = dict[str, Any]()
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": part for inner, part in _flat(value).items()}
        else:
            flat[name] = value
    return flat
