"""What Jasper's tables leave open, reckoned without a GPU: memory against the published batches,
launches of a call, and what eight seeds tell.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from asrkit.models import CTCModel, JasperConfig, presets
from asrkit.models.transducer import CTCConfig, log_probs
from asrkit.shapes import expect
from asrkit.workbench.claims import published
from asrkit.workbench.measure import fake_peak, launch_profile

GIB = 2**30
Precision = Literal["float32", "mixed"]
Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# Memory


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Peak memory of a training step over its batch: a fixed part, and as much for each utterance.

    Attributes:
        fixed_GiB: Weights, gradients and momentum, and what a batch of any size needs.
        utterance_GiB: More for each utterance.
    """

    fixed_GiB: float
    utterance_GiB: float

    def peak_GiB(self, batch: int) -> float:
        """Peak of a step of `batch` utterances."""
        return self.fixed_GiB + batch * self.utterance_GiB

    def largest_batch(self, memory_GiB: float) -> int:
        """The largest power of two whose step fits; 0 if one utterance does not."""
        if self.peak_GiB(1) > memory_GiB:
            return 0
        batch = 1
        while self.peak_GiB(2 * batch) <= memory_GiB:
            batch *= 2
        return batch


def training_peak(
    batch: int,
    frames: int,
    precision: Precision = "float32",
    *,
    config: CTCConfig | None = None,
) -> int:
    """Peak bytes of one training step of a Jasper, on tensors without numbers.

    Forward pass of the published structure (`masked_everywhere`), backward pass and an update with
    momentum, in float32 or as autocast computes it: convolutions take half copies of their weights,
    activations are half. Dropout keeps a byte for each activation, as on a GPU. Averaged weights,
    DDP's buckets, cuDNN's workspaces and what the allocator cannot use come on top.

    Args:
        batch: Utterances, all but one of full length.
        frames: Feature frames of the longest.
        precision: "float32" (TF32 takes as much), or "mixed".
        config: Of the model; None for Jasper 10x5 DR.
    """
    expect(precision in ("float32", "mixed"), "precision", "'float32' or 'mixed'", repr(precision))
    config = config or presets.jasper_10x5dr()
    with torch.device("meta"):
        model = CTCModel(config).train()
        features = torch.empty(batch, frames, config.encoder.bins)
        encoder: Any = model.encoder
        for stage in encoder.stages:
            stage.dropout = _Dropout(stage.dropout.p)
        lengths = torch.full((batch,), frames)  # not asked, so that padding is masked
    if precision == "mixed":
        _cast_convolutions(model)
    weights = list(model.parameters())
    momenta = [torch.zeros_like(weight) for weight in weights]
    step = _MomentumStep(partial(masked_everywhere, model), weights, momenta, lengths)
    return fake_peak(step, features, held=(model, *momenta), steps=1)


def training_memory(
    frames: int = 1920,
    precision: Precision = "float32",
    *,
    config: CTCConfig | None = None,
) -> TrainingMemory:
    """The line through the peaks of batches of 16 and 32, which takes some seconds.

    Args:
        frames: Feature frames of the longest utterance: 1,670 are LibriSpeech's 16.7 s, and 1,920
            those slowed down by 15 %.
        precision: "float32" or "mixed".
        config: Of the model; None for Jasper 10x5 DR.
    """
    peak = partial(training_peak, frames=frames, precision=precision, config=config)
    small = peak(16) / GIB
    large = peak(32) / GIB
    each = (large - small) / 16
    return TrainingMemory(fixed_GiB=small - 16 * each, utterance_GiB=each)


class _Dropout(nn.Module):
    """Dropout as a GPU computes it: a CPU would keep a number for each activation, not a byte."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share

    def forward(self, x: Tensor) -> Tensor:
        """`x` with some activations dropped."""
        return _dropped(x, self.p, self.training)


class _Half(nn.Module):
    """A weight as autocast gives it to a product."""

    def forward(self, weight: Tensor) -> Tensor:
        """`weight` in half precision."""
        return weight.to(torch.bfloat16)


def _cast_convolutions(model: CTCModel) -> None:
    """Make products take half copies of their weights; norms return what they get in half."""
    convolutions = [part for part in model.encoder.modules() if isinstance(part, nn.Conv1d)]
    for convolution in convolutions:
        parametrize.register_parametrization(convolution, "weight", _Half(), unsafe=True)
    convolutions[0].register_forward_pre_hook(lambda _, inputs: (inputs[0].to(torch.bfloat16),))
    head: Any = model.output
    parametrize.register_parametrization(head, "weight", _Half(), unsafe=True)
    parametrize.register_parametrization(head, "bias", _Half(), unsafe=True)


@dataclass(frozen=True)
class _MomentumStep:
    """A step whose loss needs no labels: a CTC loss takes little beside the encoder."""

    forward: Forward
    weights: list[nn.Parameter]
    momenta: list[Tensor]
    lengths: Tensor

    def __call__(self, features: Tensor) -> None:
        scores, _ = self.forward(features, self.lengths)
        scores.sum().backward()
        with torch.no_grad():
            gradients: Any = [weight.grad for weight in self.weights]
            weights: Any = self.weights
            torch._foreach_mul_(self.momenta, 0.95)
            torch._foreach_add_(self.momenta, gradients)
            torch._foreach_sub_(weights, self.momenta, alpha=0.01)
            del gradients
        for weight in self.weights:
            weight.grad = None


CARDS_GIB = {"DGX-1 16GB": 16, "DGX-1 32GB": 32, "DGX A100": 80}  # of a GPU of each system
DRIVER_GIB = 0.5  # that driver and context keep
AVERAGE_GIB = 1.24  # averaged weights, which the published training keeps on the GPU
# Share of a card for cuDNN's workspaces and the allocator's gaps: with less left, who knows.
SPARE = 0.15
TRAINING_TABLE = "jasper_training.csv"


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """A published batch beside the one that a count of memory allows, both powers of two.

    Attributes:
        card_GiB: Memory of the GPU.
        precision: "float32" (TF32 on an A100) or "mixed".
        printed: The largest batch of the published table.
        counted: The largest batch that fits.
        peak_GiB: Peak of that batch, averaged weights included.
        left_GiB: What is left beside it.
    """

    card_GiB: int
    precision: Precision
    printed: int
    counted: int
    peak_GiB: float
    left_GiB: float

    @property
    def verdict(self) -> str:
        """What the two tell: "agrees", "borderline", "no maximum" or "does not fit".

        It is borderline where cuDNN's workspaces and the allocator's gaps decide.
        """
        if self.counted == self.printed:
            return "agrees"
        if self.counted < self.printed:
            return "does not fit"
        if self.counted == 2 * self.printed and self.left_GiB < SPARE * self.card_GiB:
            return "borderline"
        return "no maximum"


def batch_limits(float32: TrainingMemory, mixed: TrainingMemory) -> list[BatchLimit]:
    """The largest published batches of three GPUs beside those that fit by `training_memory`.

    Args:
        float32: Peaks in float32.
        mixed: Peaks in mixed precision.
    """
    limits = []
    memories: dict[Precision, TrainingMemory] = {"float32": float32, "mixed": mixed}
    for system, card_GiB in CARDS_GIB.items():
        for precision, memory in memories.items():
            lines = [line for line in published(TRAINING_TABLE) if line["system"] == system]
            batches = [
                int(line["batch"])
                for line in lines
                if (line["precision"] == "mixed") == (precision == "mixed")
            ]
            room_GiB = card_GiB - DRIVER_GIB - AVERAGE_GIB
            counted = memory.largest_batch(room_GiB)
            peak_GiB = memory.peak_GiB(counted) + AVERAGE_GIB
            limit = BatchLimit(
                card_GiB=card_GiB,
                precision=precision,
                printed=max(batches),
                counted=counted,
                peak_GiB=peak_GiB,
                left_GiB=card_GiB - DRIVER_GIB - peak_GiB,
            )
            limits.append(limit)
    return limits


# Launches


def masked_everywhere(model: CTCModel, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """What a CTC model with a Jasper returns, each convolution with a mask and lengths of its own.

    That is the structure of the published code: branches make their masks again too.

    Args:
        model: In eval mode, not optimized.
        features: (B, T, F).
        lengths: Frames of each utterance (B,).

    Returns:
        Log-probabilities (B, T', V) and their lengths (B,).
    """
    encoder: Any = model.encoder
    x = features.transpose(1, 2)
    sources: list[Tensor] = []
    for stage, sizes in zip(encoder.stages, encoder.config.stages, strict=True):
        if encoder.config.has_branches(sizes):
            sources.append(x)
        before = lengths
        *repeats, last = list(stage.repeats)
        for repeat in repeats:
            x, lengths = _masked(repeat, x, lengths)
            x = _dropped(x.relu(), stage.dropout.p, stage.training)
        x, lengths = _masked(last, x, lengths)
        for branch, source in zip(stage.branches, sources, strict=False):
            x += _masked(branch, source, before)[0]
        x = _dropped(x.relu(), stage.dropout.p, stage.training)
    return log_probs(model.output(x.transpose(1, 2))), lengths


def _dropped(x: Tensor, share: float, training: bool) -> Tensor:
    """`x` after dropout as a GPU computes it: it keeps a byte for each activation."""
    if not training:
        return x
    return torch.native_dropout(x, share, True)[0]


def _masked(layer: Any, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Convolution and norm of `x` (B, C, T) with zeros in its padding, and the new lengths."""
    conv = layer.conv
    frames = torch.arange(x.shape[2], device=x.device, dtype=lengths.dtype)
    padding = frames >= lengths[:, None]
    x = x.masked_fill(padding[:, None], 0)
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1)
    room = lengths + 2 * conv.padding[0] - reach - 1
    lengths = torch.floor(room / conv.stride[0]).long() + 1
    return layer.norm(conv(x)), lengths


def narrowed(config: CTCConfig, by: int) -> CTCConfig:
    """A config of a Jasper with fewer channels in every stage, and as many convolutions.

    Args:
        config: Of the Jasper.
        by: What its channels are divided by, rounding down.
    """
    sizes = config.encoder
    assert isinstance(sizes, JasperConfig)
    stages = [replace(stage, channels=max(1, stage.channels // by)) for stage in sizes.stages]
    return replace(config, encoder=replace(sizes, stages=stages))


def launches_of_call(
    run: Callable[[Tensor, Tensor], object], *, bins: int = 64, ragged: bool = True
) -> int:
    """Launches of one call on two utterances of two seconds: ops that a GPU would get.

    Args:
        run: run(features (B, T, F), lengths (B,)).
        bins: F.
        ragged: Whether the second utterance is shorter.
    """
    features = torch.randn(2, 200, bins, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([200, 151 if ragged else 200])
    with torch.no_grad():  # in inference mode dropout would count as a copy, which it is not
        return launch_profile(lambda: run(features, lengths)).launches


# Seeds

SEEDS_TABLE = "jasper_seeds.csv"
SEEDS = 8
TAIL = 10.0  # standard deviations that integrals go to


@dataclass(frozen=True, kw_only=True)
class SeedRuns:
    """Word error rates of trainings that differ in their seed alone.

    Attributes:
        system: Machine.
        set: Of LibriSpeech.
        percent: Word error rate of each seed.
        reported: The one that the accuracy table prints.
    """

    system: str
    set: str
    percent: tuple[float, ...]
    reported: float

    @property
    def mean(self) -> float:
        """Mean of the seeds."""
        return float(np.mean(self.percent))

    @property
    def std(self) -> float:
        """Standard deviation of a sample: squares over n - 1. The table divides by n."""
        return float(np.std(self.percent, ddof=1))

    @property
    def gain(self) -> float:
        """How much lower the reported rate is than the mean."""
        return self.mean - self.reported


def seed_runs(system: str | None = None, of: str | None = None) -> list[SeedRuns]:
    """The published trainings by seed.

    Args:
        system: "DGX A100" or "DGX-1 32GB"; None for both.
        of: dev-clean, dev-other, test-clean or test-other; None for all.
    """
    found = []
    for line in published(SEEDS_TABLE):
        if system in (None, line["system"]) and of in (None, line["set"]):
            percent = tuple(line[f"seed_{number}"] for number in range(1, SEEDS + 1))
            runs = SeedRuns(
                system=line["system"],
                set=line["set"],
                percent=percent,
                reported=line["reported_percent"],
            )
            found.append(runs)
    expect(bool(found), "system, of", "a line of jasper_seeds.csv", (system, of))
    return found


def expected_minimum(n: int) -> float:
    """Mean of the smallest of `n` draws of a standard normal: -1.42 for 8.

    Args:
        n: Draws.
    """
    x = np.linspace(-TAIL, TAIL, 4001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    above = 1 - np.array([_below(place) for place in x])
    return float(np.trapezoid(x * n * density * above ** (n - 1), x))


def chance_of_gain(gain: float, std: float, n: int) -> float:
    """Probability that the best of `n` equal trainings beats their true mean by `gain` or more.

    Args:
        gain: In the unit of `std`.
        std: Standard deviation over seeds, above 0.
        n: Trainings, of which the best is reported.
    """
    return 1 - (1 - _below(-gain / std)) ** n


def permutation_p(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of all divisions of the pooled values whose means differ at least as much: two-sided.

    Args:
        one: Values of one group.
        other: Values of the other; all divisions are counted, so both are short.
    """
    pooled = np.array([*one, *other], dtype=float)
    count = len(one)
    expect(0 < count < len(pooled), "one, other", "a value each at least", (count, len(other)))
    expect(len(pooled) <= 20, "one, other", "at most 20 values", len(pooled))
    seen = abs(pooled[:count].mean() - pooled[count:].mean())
    rows = np.array(list(combinations(range(len(pooled)), count)))
    means = pooled[rows].mean(axis=1)
    others = (pooled.sum() - count * means) / (len(pooled) - count)
    return float((np.abs(means - others) >= seen - 1e-9).mean())


def _below(x: float) -> float:
    """Share of a standard normal below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
