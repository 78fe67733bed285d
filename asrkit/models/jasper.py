"""Jasper: a deep stack of plain convolutions, each block connected to all blocks before it.

Features (B, T, F) and lengths (B,) in; encoded frames (B, T', D) and their lengths (B,) out.
Source: Li et al. 2019, Jasper (arXiv 1904.03288); sizes and lengths as in NVIDIA's
DeepLearningExamples, PyTorch/SpeechRecognition/Jasper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from asrkit.models.common import (
    Encoded,
    dtype_of,
    expect_batch,
    expect_sizes,
    padding_mask,
    strided,
)
from asrkit.shapes import expect, expect_types

NORM_EPS = 1e-3
NORM_MOMENTUM = 0.1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One block of a Jasper: equal convolutions, each with batch norm, ReLU and dropout.

    Args:
        channels: Channels of every convolution.
        kernel: Frames of each convolution, an odd number.
        repeat: Convolutions in a row.
        dropout: Share of activations dropped after each convolution, in training.
        stride: Frames from one output to the next. A stage that strides has one convolution.
        dilation: Frames between two taps of a kernel.
        dense: Whether branches are added to the last convolution: a 1x1 convolution and batch norm
            for the input of this stage and of each dense stage before it.
    """

    channels: int
    kernel: int
    repeat: int = 5
    dropout: float = 0.2
    stride: int = 1
    dilation: int = 1
    dense: bool = True

    def __post_init__(self) -> None:
        expect_sizes(self, "channels kernel repeat stride dilation")
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)
        expect(
            self.stride == 1 or (self.repeat == self.dilation == 1 and not self.dense),
            "stride",
            "1, but for a stage with repeat=1, dilation=1 and dense=False",
            self.stride,
        )


def _published_stages() -> tuple[Stage, ...]:
    """Conv1, ten blocks of five convolutions, Conv2 and Conv3 of Jasper 10x5 DR."""
    blocks = []
    sizes = ((256, 11, 0.2), (384, 13, 0.2), (512, 17, 0.2), (640, 21, 0.3), (768, 25, 0.3))
    for channels, kernel, dropout in sizes:
        blocks += [Stage(channels=channels, kernel=kernel, dropout=dropout)] * 2
    first = Stage(channels=256, kernel=11, repeat=1, dropout=0.2, stride=2, dense=False)
    wide = Stage(channels=896, kernel=29, repeat=1, dropout=0.4, dilation=2, dense=False)
    last = Stage(channels=1024, kernel=1, repeat=1, dropout=0.4, dense=False)
    return (first, *blocks, wide, last)


@dataclass(frozen=True, kw_only=True)
class JasperConfig:
    """Sizes of a `Jasper`; the defaults are those of Jasper 10x5 DR.

    Args:
        bins: Mel bins of the features, F.
        stages: The blocks, first to last.
    """

    bins: int = 64
    stages: Sequence[Stage] = _published_stages()

    def __post_init__(self) -> None:
        expect_types(self)
        stages = tuple(self.stages)  # JSON has lists
        object.__setattr__(self, "stages", stages)
        expect(self.bins >= 1 and len(stages) >= 1, "config", "a bin and a Stage at least", self)
        dense = False
        for number, stage in enumerate(stages):
            expect(
                not (dense and stage.stride > 1),
                "stages",
                "no stride after a dense stage",
                f"stride {stage.stride} in stage {number}",
            )
            dense = dense or stage.dense

    @property
    def subsampling(self) -> int:
        """Frames of features for one encoded frame."""
        return math.prod(stage.stride for stage in self.stages)

    @property
    def layers(self) -> int:
        """Convolutions of the stages, without those of branches."""
        return sum(stage.repeat for stage in self.stages)

    @property
    def receptive_field(self) -> int:
        """Frames of features that an encoded frame depends on."""
        frames = 1
        step = 1  # feature frames between two frames of this stage's input
        for stage in self.stages:
            reach = (stage.kernel - 1) * stage.dilation
            frames += reach * stage.repeat * step
            step *= stage.stride
        return frames

    def branch_channels(self) -> list[list[int]]:
        """For each stage, the channels of the inputs of its branches, oldest first."""
        channels = []
        sources = []
        inputs = self.bins
        for stage in self.stages:
            if stage.dense:
                sources.append(inputs)
            channels.append([*sources] if stage.dense else [])
            inputs = stage.channels
        return channels


class ConvNorm(nn.Module):
    """A convolution without bias, and batch norm: (B, C, T) in, (B, channels, T') out."""

    def __init__(
        self, inputs: int, channels: int, kernel: int, *, stride: int = 1, dilation: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            inputs,
            channels,
            kernel,
            stride=stride,
            dilation=dilation,
            padding=dilation * (kernel // 2),
            bias=False,
        )
        self.norm = nn.BatchNorm1d(channels, eps=NORM_EPS, momentum=NORM_MOMENTUM)
        nn.init.xavier_uniform_(self.conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, T') from (B, C, T), whose padding has to be zero."""
        return self.norm(self.conv(x))


class JasperStage(nn.Module):
    """A stage with its branches."""

    def __init__(self, config: Stage, inputs: int, branch_channels: Sequence[int]) -> None:
        super().__init__()
        channels = config.channels
        self.repeats = nn.ModuleList()
        steps = {"stride": config.stride, "dilation": config.dilation}
        for _ in range(config.repeat):
            self.repeats.append(ConvNorm(inputs, channels, config.kernel, **steps))
            inputs = channels
        self.branches = nn.ModuleList(ConvNorm(source, channels, 1) for source in branch_channels)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sources: Sequence[Tensor], padding: Tensor | None) -> Tensor:
        """Output (B, channels, T') of a stage, zero in its padding.

        Args:
            x: Input (B, C, T), zero in its padding.
            sources: Input of each branch (B, C', T), zero in their padding.
            padding: (B, T') bool, True in the padding of the output; None without padding.
        """
        *earlier, last = self.repeats
        for repeat in earlier:
            x = self._activate(repeat(x), padding)
        x = last(x)
        for branch, source in zip(self.branches, sources, strict=True):
            x = x + branch(source)
        return self._activate(x, padding)

    def _activate(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return without_padding(self.dropout(x.relu()), padding)


def without_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """`x` (B, C, T) with zeros where `padding` (B, T) is True; None means no padding."""
    if padding is None:
        return x
    return x.masked_fill(padding[:, None], 0.0)


class Jasper(nn.Module):
    """Stages of convolutions with dense residuals. The padding has no influence.

    The padding is zero before every convolution, those of branches included. One mask serves all
    convolutions of the same length, and batches without padding need none.
    """

    def __init__(self, config: JasperConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.stages[-1].channels
        self.stages = nn.ModuleList()
        inputs = config.bins
        for stage, branches in zip(config.stages, config.branch_channels(), strict=True):
            self.stages.append(JasperStage(stage, inputs, branches))
            inputs = stage.channels

    def forward(self, features: Tensor, lengths: Tensor) -> Encoded:
        """Encode a batch of features.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), 1 to T, int64, on the features' device or the
                host.

        Returns:
            Encoded frames (B, T', D), zero in the padding, and their lengths (B,), on the device of
            `lengths`.
        """
        T = expect_batch(features, lengths, self.config.bins)
        padding = padding_mask(lengths, T, features.device)
        x = without_padding(features.transpose(1, 2), padding).to(dtype_of(self))  # (B, F, T)
        sources = []
        for stage, sizes in zip(self.stages, self.config.stages, strict=True):
            if sizes.dense:
                sources.append(x)
            if sizes.stride > 1:
                lengths = strided(lengths, sizes.stride)
                padding = padding_mask(lengths, strided(x.shape[2], sizes.stride), features.device)
            x = stage(x, sources if sizes.dense else [], padding)
        return x.transpose(1, 2), lengths
