"""Whisper's encoder (arXiv 2212.04356): two convolutions, and Transformer layers over all frames.

Features (B, T, F) and lengths (B,) in; encoded frames (B, T', D) and their lengths (B,) out. The
decoder is that of an `AEDModel` with other options: see `asrkit.models.presets`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.devices import to_device
from asrkit.models.common import (
    Encoded,
    expect_batch,
    expect_heads,
    expect_sizes,
    join_heads,
    padding_mask,
    split_heads,
    strided,
)
from asrkit.shapes import expect, valid_mask

MIN_BY_HEAD = 500  # frames from which attention head by head is faster


@dataclass(frozen=True, kw_only=True)
class WhisperEncoderConfig:
    """Sizes of a `WhisperEncoder`; the defaults are those of Whisper tiny.

    Args:
        bins: Mel bins of the features, F.
        width: Width of the encoded frames, D.
        layers: Transformer layers.
        heads: Attention heads, H, a divisor of `width`.
        expansion: Width of the feed-forwards, as a multiple of D.
        most: Positions, which limit the encoded frames; 1,500 are 30 s.
        dropout: Share of activations and attention weights dropped in training.
    """

    bins: int = 80
    width: int = 384
    layers: int = 4
    heads: int = 6
    expansion: int = 4
    most: int = 1500
    dropout: float = 0.0

    def __post_init__(self) -> None:
        expect_sizes(self, "bins width layers heads expansion most")
        expect_heads(self)

    @property
    def subsampling(self) -> int:
        """Frames of features for one encoded frame."""
        return 2


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward: residuals, each after a layer norm.

    Whisper's keys have no bias. Here they have one, because they share a product with queries and
    values. It changes nothing, since it adds the same to all scores of a query.
    """

    def __init__(self, config: WhisperEncoderConfig) -> None:
        super().__init__()
        D = config.width
        inner = config.expansion * D
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.feed_forward_norm = nn.LayerNorm(D)
        self.feed_forward = nn.Sequential(nn.Linear(D, inner), nn.GELU(), nn.Linear(inner, D))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """Frames (B, T, D) of frames x (B, T, D).

        Args:
            x: Frames.
            seen: True for frames that are attended to, (B, 1, 1, T) bool; None for all.
        """
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        queries, keys, values = (split_heads(part, self.heads) for part in parts)
        share = self.dropout.p if self.training else 0.0
        if seen is None and attends_by_head(queries, share):
            mixed = attention_by_head(queries, keys, values)
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, seen, dropout_p=share)
        x = x + self.dropout(self.out(join_heads(mixed)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class WhisperEncoder(nn.Module):
    """Convolutions over three frames, the second of stride 2, fixed positions and layers.

    The published models were trained on windows of 30 s only, which `FeatureConfig(fill_s=30.0)`
    makes of shorter utterances with silence. The encoder itself takes any length up to 2 `most`
    frames, and the padding has no influence.
    """

    positions: Tensor  # (most, D)

    def __init__(self, config: WhisperEncoderConfig) -> None:
        super().__init__()
        D = config.width
        self.config = config
        self.width = D
        self.most_frames = 2 * config.most  # of features
        self.conv = nn.Conv1d(config.bins, D, 3, padding=1)
        self.stride = nn.Conv1d(D, D, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", sines(config.most, D, self.conv.weight))

    def forward(self, features: Tensor, lengths: Tensor) -> Encoded:
        """Encode a batch of features. The padding has no influence.

        Args:
            features: Log-mel features (B, T, F), T at most 2 `most`.
            lengths: Frames of each utterance (B,), int64, on the features' device or the host.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,), on the device of `lengths`.

        Raises:
            ValueError: A shape is wrong, or there are more frames than positions.
        """
        T = expect_batch(features, lengths, self.config.bins)
        expect(
            self.most_frames >= T,
            "features",
            f"at most {self.most_frames} frames, as the model has positions",
            T,
            "Cut longer recordings into windows.",
        )
        padding = to_device(~valid_mask(lengths, T), features.device)
        x = features.masked_fill(padding[..., None], 0.0).to(self.positions.dtype)
        x = F.gelu(self.conv(x.transpose(1, 2)))  # (B, D, T)
        x = F.gelu(self.stride(x.masked_fill(padding[:, None], 0.0)))  # (B, D, T')
        lengths = strided(lengths, 2)
        x = x.transpose(1, 2)
        x = self.dropout(x + self.positions[: x.shape[1]])
        # An utterance without frames attends to its first one: not every kernel allows none.
        unseen = padding_mask(lengths.clamp(min=1), x.shape[1], x.device)
        seen = None if unseen is None else ~unseen[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        return self.norm(x), lengths


def attends_by_head(queries: Tensor, dropout: float) -> bool:
    """Whether `attention_by_head` is faster: for many frames in bfloat16 on a CPU."""
    fast = queries.dtype == torch.bfloat16 and queries.device.type == "cpu"
    return fast and queries.shape[2] >= MIN_BY_HEAD and not dropout and not torch.is_grad_enabled()


def attention_by_head(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention (B, H, T, D / H), computed for one head of one utterance at a time.

    The scores of a head then stay in the cache. On an AMD EPYC with AVX-512 that takes 0.57 times
    as long as torch's own attention in bfloat16, for 1,500 frames and heads of 64.
    """
    scaled = queries / math.sqrt(queries.shape[3])
    mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for row in range(len(queries)):
        for head in range(queries.shape[1]):
            scores = scaled[row, head] @ keys[row, head].T
            torch.mm(scores.softmax(1), values[row, head], out=mixed[row, head])
    return mixed


def sines(most: int, D: int, like: Tensor) -> Tensor:
    """Whisper's fixed positions (most, D): all sines, then all cosines, computed in float32.

    Wavelengths rise from 2 pi to 20,000 pi frames, both included. Those of Canary, in
    `asrkit.models.attention_decoder.sines`, end before.

    Args:
        most: Number of positions.
        D: Width of a position, an even number from 4.
        like: A tensor whose device and dtype the result has.
    """
    if like.is_meta:  # torch.arange would import torch's compiler
        return like.new_empty(most, D)
    half = D // 2
    numbers = torch.arange(half, device=like.device, dtype=torch.float32)
    frequencies = torch.exp(numbers * (-math.log(10_000) / (half - 1)))
    frames = torch.arange(most, device=like.device, dtype=torch.float32)
    angles = frames[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1).to(like.dtype)
