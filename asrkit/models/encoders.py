"""Encoders: features (B, T, F) and lengths (B,) in, encoded frames (B, T', D) and lengths (B,) out, T' = T / subsampling."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.shapes import dims, expect, valid_mask


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
        expect(min(self.bins, self.width, self.kernel) >= 1 and self.layers >= 0, "config", "sizes of at least 1", self)
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)


@dataclass(frozen=True, kw_only=True)
class FastConformerConfig:
    """FastConformer (arXiv 2305.05084); the published sizes are width 512 / 1024, 17 / 24 / 42 layers, 8 heads."""

    bins: int = 80
    width: int = 144
    layers: int = 4
    heads: int = 4
    subsampling: int = 8
    subsampling_channels: int = 64
    kernel: int = 9
    expansion: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        sizes = self.bins, self.width, self.heads, self.subsampling_channels, self.kernel, self.expansion
        expect(min(sizes) >= 1 and self.layers >= 0, "config", "sizes of at least 1", self)
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        expect(self.width % self.heads == 0, "heads", f"a divisor of width {self.width}", self.heads)
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)


def _halve(lengths: Tensor) -> Tensor:
    return torch.div(lengths - 1, 2, rounding_mode="floor") + 1  # a stride-2 convolution with "same" padding


class ConvEncoder(nn.Module):
    """Strided convolutions, then dilated residual convolutions with batch norm. Receptive field about 1.6 s at defaults."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        D, kernel = config.width, config.kernel
        self.config, self.width = config, D
        self.strides = nn.ModuleList(
            nn.Conv1d(config.bins if i == 0 else D, D, kernel, stride=2, padding=kernel // 2, bias=False)
            for i in range(int(math.log2(config.subsampling)))
        )
        dilations = [1 + i % 3 for i in range(config.layers)]
        self.convs = nn.ModuleList(nn.Conv1d(D, D, kernel, dilation=d, padding=d * (kernel // 2), bias=False) for d in dilations)
        self.stride_norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.strides)
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.convs)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,)."""
        dims(features, "B T F", "features", F=self.config.bins)
        x = features.masked_fill(~valid_mask(lengths, features.shape[1])[..., None], 0.0).transpose(1, 2)  # (B, F, T)
        for conv, norm in zip(self.strides, self.stride_norms, strict=True):
            x = norm(conv(x)).relu()
            lengths = _halve(lengths)
            x = x * valid_mask(lengths, x.shape[2])[:, None]  # what lies in the padding must not leak into a window
        valid = valid_mask(lengths, x.shape[2])[:, None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = (x + self.dropout(norm(conv(x)).relu())) * valid
        return x.transpose(1, 2), lengths


class _Subsampling(nn.Module):
    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        C, self.halvings, bins = config.subsampling_channels, int(math.log2(config.subsampling)), config.bins
        self.convs = nn.ModuleList([nn.Conv2d(1, C, 3, stride=2, padding=1)])
        for _ in range(self.halvings - 1):  # depthwise, then pointwise
            self.convs.append(nn.Sequential(nn.Conv2d(C, C, 3, 2, 1, groups=C), nn.Conv2d(C, C, 1)))
        for _ in range(self.halvings):
            bins = (bins - 1) // 2 + 1
        self.out = nn.Linear(C * bins, config.width)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = features[:, None]  # (B, 1, T, F)
        for conv in self.convs:
            x = x * valid_mask(lengths, x.shape[2])[:, None, :, None]
            x = conv(x).relu()
            lengths = _halve(lengths)
        return self.out(x.transpose(1, 2).flatten(2)), lengths


class _RelativeAttention(nn.Module):
    """Multi-head attention with Transformer-XL positions (arXiv 1901.02860, equation in section 3.3)."""

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        D, self.heads = config.width, config.heads
        self.qkv, self.position, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.content_bias = nn.Parameter(torch.zeros(self.heads, 1, D // self.heads))
        self.position_bias = nn.Parameter(torch.zeros(self.heads, 1, D // self.heads))

    def forward(self, x: Tensor, valid: Tensor, positions: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        p = self.position(positions).view(2 * T - 1, self.heads, -1).permute(1, 2, 0)  # (H, D/H, 2T-1)
        scores = (q + self.position_bias) @ p  # (B, H, T, 2T-1), column c is distance T - 1 - c
        scores = F.pad(scores, (1, 0)).view(B, self.heads, 2 * T, T)[:, :, 1:].reshape(B, self.heads, T, 2 * T - 1)
        bias = scores[..., :T] / math.sqrt(q.shape[-1])  # shifted row by row: (B, H, T, T)
        bias = bias.masked_fill(~valid[:, None, None, :], torch.finfo(bias.dtype).min)
        return self.out(F.scaled_dot_product_attention(q + self.content_bias, k, v, bias).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        D, wide = config.width, config.width * config.expansion
        self.feed = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, wide), nn.SiLU(), nn.Dropout(config.dropout), nn.Linear(wide, D))
            for _ in range(2)
        )
        self.attention_norm, self.attention = nn.LayerNorm(D), _RelativeAttention(config)
        self.conv_norm, self.gate = nn.LayerNorm(D), nn.Linear(D, 2 * D)
        self.depthwise = nn.Conv1d(D, D, config.kernel, padding=config.kernel // 2, groups=D)
        self.batch_norm, self.pointwise = nn.BatchNorm1d(D), nn.Linear(D, D)
        self.final_norm, self.dropout = nn.LayerNorm(D), nn.Dropout(config.dropout)

    def forward(self, x: Tensor, valid: Tensor, positions: Tensor) -> Tensor:
        x = x + 0.5 * self.dropout(self.feed[0](x))
        x = x + self.dropout(self.attention(self.attention_norm(x), valid, positions))
        y = F.glu(self.gate(self.conv_norm(x)), -1) * valid[..., None]
        y = F.silu(self.batch_norm(self.depthwise(y.transpose(1, 2)))).transpose(1, 2)
        x = x + self.dropout(self.pointwise(y))
        return self.final_norm(x + 0.5 * self.dropout(self.feed[1](x)))


class FastConformer(nn.Module):
    """Conformer blocks behind a depthwise-striding subsampling; relative positions, full context."""

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        self.subsampling = _Subsampling(config)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,)."""
        B, T, bins = dims(features, "B T F", "features", F=self.config.bins)
        features = features.masked_fill(~valid_mask(lengths, T)[..., None], 0.0)
        x, lengths = self.subsampling(features, lengths)
        valid, positions = valid_mask(lengths, x.shape[1]), self._positions(x)
        for block in self.blocks:
            x = block(x, valid, positions)
        return x * valid[..., None], lengths

    def _positions(self, x: Tensor) -> Tensor:
        T, D = x.shape[1], x.shape[2]
        distance = torch.arange(T - 1, -T, -1, device=x.device, dtype=torch.float32)[:, None]
        angle = distance * torch.exp(torch.arange(0, D, 2, device=x.device) * (-math.log(10_000) / D))
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :D].to(x.dtype)  # (2T-1, D)
