"""Notebook 11: Jasper's published latencies, its memory, and its launches.

What the published tables do not show is computed without a GPU: the memory of the published
batches, and the launches of a call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter, NullFormatter
from torch import Tensor, nn
from torch.nn.utils import parametrize

from asrkit.models import CTCModel, JasperConfig, presets
from asrkit.models.ctc import CTCConfig, log_probs
from asrkit.workbench.claims import published
from asrkit.workbench.cost import LatencyCell, encoder_flops, two_numbers
from asrkit.workbench.measure import fake_peak, launch_profile
from asrkit.workbench.plots.palette import COLOURS

GIB = 2**30
Precision = Literal["float32", "mixed"]


# Latency


def published_latencies(system: str) -> list[LatencyCell]:
    """The cells of Jasper's published inference table for a machine, with the printed mean latency.

    Args:
        system: Name of the machine, such as "DGX A100".
    """
    cells = []
    for line in published("jasper_inference.csv"):
        batch = int(line["batch"])
        seconds = line["duration_s"]
        cell = LatencyCell(
            batch=batch,
            seconds=seconds,
            precision=line["precision"],
            latency_ms=line["avg_ms"],
            FLOP=encoder_flops(JasperConfig(), B=batch, T=round(100 * seconds)),
        )
        if line["system"] == system:
            cells.append(cell)
    return cells


def latency_over_work(groups: Mapping[str, Sequence[LatencyCell]], ax: Axes) -> None:
    """Draw latency over operations as dots, and for each group the line max(floor, work / rate).

    Args:
        groups: Name -> cells of one machine and precision, at least three with different work.
        ax: Axes to draw on.
    """
    for (name, cells), shade in zip(groups.items(), COLOURS, strict=False):
        fit = two_numbers(cells)
        work = np.array([cell.FLOP for cell in cells])
        label = f"{name}: {fit.floor_ms:.3g} ms, {fit.TFLOP_per_s:.3g} TFLOP/s"
        times = [cell.latency_ms for cell in cells]
        ax.plot(work / 1e12, times, "o", color=shade, ms=4, alpha=0.7, label=label)
        line = np.geomspace(work.min(), work.max(), 200)
        ax.plot(line / 1e12, [fit.ms(FLOP) for FLOP in line], color=shade, lw=1.5)
    ax.set(xscale="log", yscale="log", xlabel="work of a call, TFLOP", ylabel="latency, ms")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    ax.legend(frameon=False, loc="upper left")


# Memory


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Peak memory of a training step as a linear function of its batch.

    Attributes:
        fixed_GiB: Memory that does not depend on the batch: weights, gradients and momentum.
        utterance_GiB: Additional memory for each utterance.
    """

    fixed_GiB: float
    utterance_GiB: float

    def peak_GiB(self, batch: int) -> float:
        """Peak memory of a step with `batch` utterances."""
        return self.fixed_GiB + batch * self.utterance_GiB

    def largest_batch(self, memory_GiB: float) -> int:
        """The largest power of two whose step fits; 0 if one utterance does not fit."""
        utterances = max(0, int((memory_GiB - self.fixed_GiB) / self.utterance_GiB))
        return (1 << utterances.bit_length()) >> 1


def training_peak(
    batch: int, frames: int, precision: Precision, config: CTCConfig | None = None
) -> int:
    """Peak bytes of one training step of a Jasper, on "meta" tensors.

    The step is a forward pass of the published structure (`masked_everywhere`), a backward pass and
    an update with momentum, in float32 or as with autocast: convolutions take half-precision copies
    of their weights, and activations are in half precision. As on a GPU, dropout keeps a byte for
    each activation. Averaged weights, DDP's buckets, cuDNN's workspaces and fragmentation come on
    top.

    Args:
        batch: Number of utterances, all of full length.
        frames: Feature frames of each.
        precision: "float32" (TF32 takes the same memory) or "mixed".
        config: Configuration of the model; None for Jasper 10x5 DR.
    """
    config = config or presets.jasper_10x5dr()
    with torch.device("meta"):
        model = CTCModel(config).train()
        features = torch.empty(batch, frames, config.encoder.bins)
        lengths = torch.full((batch,), frames)  # their values are not read, so padding is masked
    if precision == "mixed":
        _cast_convolutions(model)
    momenta = [torch.zeros_like(weight) for weight in model.parameters()]
    step = momentum_step(model, momenta, lengths)
    return fake_peak(step, features, held=(model, *momenta), steps=1)


def training_memory(
    precision: Precision, frames: int = 1920, config: CTCConfig | None = None
) -> TrainingMemory:
    """The line through the peaks of batches of 16 and 32, in a few seconds.

    Args:
        precision: "float32" or "mixed".
        frames: Feature frames of the longest utterance. 1,670 are LibriSpeech's 16.7 s, and 1,920
            the same slowed down by 15 %.
        config: Configuration of the model; None for Jasper 10x5 DR.
    """
    small, large = (training_peak(batch, frames, precision, config) / GIB for batch in (16, 32))
    utterance = (large - small) / 16
    return TrainingMemory(fixed_GiB=small - 16 * utterance, utterance_GiB=utterance)


class _Half(nn.Module):
    """Casts a weight as autocast does."""

    def forward(self, weight: Tensor) -> Tensor:
        """`weight` in half precision."""
        return weight.to(torch.bfloat16)


def _cast_convolutions(model: CTCModel) -> None:
    """Make products take half-precision copies of their weights; norms keep the dtype of inputs."""
    convolutions = [part for part in model.encoder.modules() if isinstance(part, nn.Conv1d)]
    for convolution in convolutions:
        parametrize.register_parametrization(convolution, "weight", _Half(), unsafe=True)
    convolutions[0].register_forward_pre_hook(lambda _, inputs: (inputs[0].to(torch.bfloat16),))
    head = model.output
    parametrize.register_parametrization(head, "weight", _Half(), unsafe=True)
    parametrize.register_parametrization(head, "bias", _Half(), unsafe=True)


def momentum_step(
    model: CTCModel, momenta: list[Tensor], lengths: Tensor
) -> Callable[[Tensor], None]:
    """step(features): an update whose loss needs no labels, as a CTC loss takes little memory."""
    weights: Any = list(model.parameters())

    def step(features: Tensor) -> None:
        scores, _ = masked_everywhere(model, features, lengths)
        scores.sum().backward()
        with torch.no_grad():
            torch._foreach_mul_(momenta, 0.95)
            torch._foreach_add_(momenta, [weight.grad for weight in weights])
            torch._foreach_sub_(weights, momenta, alpha=0.01)
        for weight in weights:
            weight.grad = None

    return step


CARDS_GIB = {"DGX-1 16GB": 16, "DGX-1 32GB": 32, "DGX A100": 80}  # memory of one GPU
DRIVER_GIB = 0.5  # memory of driver and context
AVERAGE_GIB = 1.24  # averaged weights, which the published training keeps on the GPU
SPARE = 0.15  # share of a card that cuDNN's workspaces and fragmentation may need


def batch_limits(memories: Mapping[Precision, TrainingMemory]) -> list[dict[str, Any]]:
    """The largest published batches of three GPUs, and those that fit, both powers of two.

    Args:
        memories: Precision -> result of `training_memory`.

    Returns:
        A row for each GPU and precision (TF32 on an A100 is float32). The verdict is "borderline"
        if cuDNN's workspaces and fragmentation decide.
    """
    rows = []
    for system, card_GiB in CARDS_GIB.items():
        lines = [line for line in published("jasper_training.csv") if line["system"] == system]
        for precision, memory in memories.items():
            mixed = precision == "mixed"
            printed = max(
                int(line["batch"]) for line in lines if (line["precision"] == "mixed") == mixed
            )
            room_GiB = card_GiB - DRIVER_GIB - AVERAGE_GIB
            counted = memory.largest_batch(room_GiB)
            left_GiB = room_GiB - memory.peak_GiB(counted)
            verdict = "no maximum"
            if counted <= printed:
                verdict = "agrees" if counted == printed else "does not fit"
            elif counted == 2 * printed and left_GiB < SPARE * card_GiB:
                verdict = "borderline"
            row = {"card, GiB": card_GiB, "precision": precision, "printed": printed}
            rows.append(row | {"counted": counted, "verdict": verdict})
    return rows


# Launches


def masked_everywhere(model: CTCModel, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a CTC model with a Jasper, computed with the structure of the published code.

    Each convolution computes its own mask and lengths, even in the branches.

    Args:
        model: A model that is not optimized.
        features: Features, (B, T, F).
        lengths: Number of frames of each utterance, (B,).

    Returns:
        Log-probabilities (B, T', V) and their lengths (B,).
    """
    encoder: Any = model.encoder
    x = features.transpose(1, 2)
    sources: list[Tensor] = []
    for stage, sizes in zip(encoder.stages, encoder.config.stages, strict=True):
        if sizes.dense:
            sources.append(x)
        before = lengths
        *repeats, last = list(stage.repeats)
        for repeat in repeats:
            x, lengths = _masked(repeat, x, lengths)
            x = _dropped(x.relu(), stage)
        x, lengths = _masked(last, x, lengths)
        for branch, source in zip(stage.branches, sources, strict=False):
            x += _masked(branch, source, before)[0]
        x = _dropped(x.relu(), stage)
    return log_probs(model.output(x.transpose(1, 2))), lengths


def _dropped(x: Tensor, stage: Any) -> Tensor:
    """`x` after dropout as a GPU computes it, which keeps a byte for each activation."""
    if not stage.training:
        return x
    return torch.native_dropout(x, stage.dropout.p, True)[0]


def _masked(layer: Any, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Convolution and norm of `x` (B, C, T) with its padding set to zero, and the new lengths."""
    conv = layer.conv
    frames = torch.arange(x.shape[2], device=x.device, dtype=lengths.dtype)
    padding = frames >= lengths[:, None]
    x = x.masked_fill(padding[:, None], 0)
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1)
    room = lengths + 2 * conv.padding[0] - reach - 1
    lengths = torch.floor(room / conv.stride[0]).long() + 1
    return layer.norm(conv(x)), lengths


def narrowed(config: CTCConfig, by: int) -> CTCConfig:
    """A Jasper with the channels of every stage divided by `by`, and all of its convolutions."""
    sizes: Any = config.encoder
    stages = [replace(stage, channels=max(1, stage.channels // by)) for stage in sizes.stages]
    return replace(config, encoder=replace(sizes, stages=stages))


def launches_of_call(run: Callable[[Tensor, Tensor], object], *, ragged: bool = True) -> int:
    """Number of launches of one call on two utterances of two seconds, as on a GPU.

    Args:
        run: run(features (B, T, F), lengths (B,)).
        ragged: Whether the second utterance is shorter.
    """
    features = torch.randn(2, 200, 64, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([200, 151 if ragged else 200])
    with torch.no_grad():  # in inference mode, dropout would count as a copy
        return launch_profile(partial(run, features, lengths)).launches
