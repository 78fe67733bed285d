"""The small convolutional encoder: features (B, T, F) and lengths (B,) in, encoded frames (B, T',
D) and lengths (B,) out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asrkit.shapes import dims, expect, expect_types, valid_mask, whole


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """Residual time-delay network: the encoder that learns most in a minute of CPU time."""

    bins: int = 80
    width: int = 128
    layers: int = 5
    kernel: int = 5
    subsampling: int = 4
    dropout: float = 0.05

    def __post_init__(self) -> None:
        expect_types(self)
        sizes = self.bins, self.width, self.kernel
        expect(
            all(whole(size, 1) for size in sizes) and whole(self.layers, 0),
            "config",
            "sizes of at least 1",
            self,
        )
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)


def halve(lengths: Tensor) -> Tensor:
    """Lengths (B,) behind a convolution of stride 2 with "same" padding."""
    return torch.div(lengths - 1, 2, rounding_mode="floor") + 1


class ConvEncoder(nn.Module):
    """Strided convolutions, then dilated residual convolutions with batch norm. Receptive field
    about 1.6 s at defaults.
    """

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        D, kernel = config.width, config.kernel
        self.config, self.width = config, D
        self.strides = nn.ModuleList(
            nn.Conv1d(
                config.bins if i == 0 else D, D, kernel, stride=2, padding=kernel // 2, bias=False
            )
            for i in range(int(math.log2(config.subsampling)))
        )
        dilations = [1 + i % 3 for i in range(config.layers)]
        self.convs = nn.ModuleList(
            nn.Conv1d(D, D, kernel, dilation=d, padding=d * (kernel // 2), bias=False)
            for d in dilations
        )
        self.stride_norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.strides)
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.convs)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,)."""
        B, T, _ = dims(features, "B T F", "features", F=self.config.bins)
        dims(lengths, "B", "lengths", B=B)
        expect(
            B > 0 and T > 0, "features", "an utterance and a frame at least", tuple(features.shape)
        )
        x = features.masked_fill(~valid_mask(lengths, features.shape[1])[..., None], 0.0).transpose(
            1, 2
        )  # (B, F, T)
        x = x.to(next(self.parameters()).dtype)
        for conv, norm in zip(self.strides, self.stride_norms, strict=True):
            x = norm(conv(x)).relu()
            lengths = halve(lengths)
            x = (
                x * valid_mask(lengths, x.shape[2])[:, None]
            )  # what lies in the padding must not leak into a window
        valid = valid_mask(lengths, x.shape[2])[:, None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = (x + self.dropout(norm(conv(x)).relu())) * valid
        return x.transpose(1, 2), lengths
