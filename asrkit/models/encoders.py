"""The small convolutional encoder.

Features (B, T, F) and lengths (B,) in; encoded frames (B, T', D) and their lengths (B,) out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asrkit.models.dtypes import dtype_of
from asrkit.runtime import to_device
from asrkit.shapes import dims, expect, expect_types, valid_mask, whole


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """Sizes of a `ConvEncoder`, the encoder that learns most in a minute of CPU time.

    Args:
        bins: Mel bins of the features, F.
        width: Channels, D.
        layers: Dilated residual convolutions behind the strided ones.
        kernel: Frames of each convolution, an odd number.
        subsampling: Frames of features for one encoded frame: 2, 4 or 8.
        dropout: Share of activations dropped in training.
    """

    bins: int = 80
    width: int = 128
    layers: int = 5
    kernel: int = 5
    subsampling: int = 4
    dropout: float = 0.05

    def __post_init__(self) -> None:
        expect_types(self)
        sizes = (self.bins, self.width, self.kernel)
        valid = all(whole(size, 1) for size in sizes) and whole(self.layers, 0)
        expect(valid, "config", "sizes of at least 1", self)
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)


def halve(lengths: Tensor) -> Tensor:
    """Lengths (B,) after a convolution of stride 2 with "same" padding: ceil(length / 2)."""
    return torch.div(lengths - 1, 2, rounding_mode="floor") + 1


class ConvEncoder(nn.Module):
    """Strided convolutions, then dilated residual convolutions with batch norm.

    Each encoded frame sees about 1.6 s of audio at the default sizes.
    """

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        D = config.width
        kernel = config.kernel
        half = kernel // 2
        halvings = int(math.log2(config.subsampling))
        self.config = config
        self.width = D
        self.strides = nn.ModuleList()
        channels = config.bins
        for _ in range(halvings):
            conv = nn.Conv1d(channels, D, kernel, stride=2, padding=half, bias=False)
            self.strides.append(conv)
            channels = D
        self.convs = nn.ModuleList()
        for layer in range(config.layers):
            dilation = 1 + layer % 3
            padding = dilation * half
            conv = nn.Conv1d(D, D, kernel, dilation=dilation, padding=padding, bias=False)
            self.convs.append(conv)
        self.stride_norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.strides)
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.convs)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch of features; what lies behind an utterance's length has no influence.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64, on the features' device or the host.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,), where `lengths` lie.
        """
        B, T, _ = dims(features, "B T F", "features", F=self.config.bins)
        dims(lengths, "B", "lengths", B=B)
        shape = tuple(features.shape)
        expect(B > 0 and T > 0, "features", "an utterance and a frame at least", shape)
        dtype = dtype_of(self)
        padding = to_device(~valid_mask(lengths, T), features.device)
        x = features.masked_fill(padding[..., None], 0.0)
        x = x.transpose(1, 2).to(dtype)  # (B, F, T)
        for conv, norm in zip(self.strides, self.stride_norms, strict=True):
            x = conv(x)  # (B, D, T / 2)
            x = norm(x).relu()
            lengths = halve(lengths)
            # The padding must not leak into the next convolution's window.
            valid = to_device(valid_mask(lengths, x.shape[2]), x.device)
            x = x * valid[:, None]
        valid = to_device(valid_mask(lengths, x.shape[2]), x.device)
        valid = valid[:, None]  # (B, 1, T')
        for conv, norm in zip(self.convs, self.norms, strict=True):
            residual = norm(conv(x)).relu()
            x = (x + self.dropout(residual)) * valid
        return x.transpose(1, 2), lengths
