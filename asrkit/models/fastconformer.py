"""FastConformer (arXiv 2305.05084): the encoder of the Parakeet models.

Log-mel features (B, T, F) in; encoded frames (B, T', D) out, with T' = ceil(T / subsampling).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.devices import to_device
from asrkit.models.common import (
    Encoded,
    dtype_of,
    expect_batch,
    expect_heads,
    expect_sizes,
    strided,
)
from asrkit.models.relative_attention import (
    Context,
    RelativeAttention,
    distance_range,
    relative_positions,
)
from asrkit.shapes import expect, valid_mask, whole

MAX_CONTEXT = 10**9  # frames


@dataclass(frozen=True, kw_only=True)
class FastConformerConfig:
    """Sizes of a `FastConformer`; `asrkit.models.presets` has the published ones.

    Args:
        bins: Mel bins of the features, F.
        width: Width of the encoded frames, D.
        layers: Conformer blocks.
        heads: Attention heads, H, a divisor of `width`.
        subsampling: Frames of features for one encoded frame: 2, 4 or 8.
        subsampling_channels: Channels of the strided convolutions.
        kernel: Frames of a block's depthwise convolution, an odd number.
        expansion: Width of a feed-forward layer, as a multiple of `width`.
        dropout: Share dropped after every part of a block, in training.
        dropout_attention: Share of attention weights dropped.
        dropout_input: Share dropped after the subsampling.
        dropout_positions: Share of the relative positions dropped.
        bias: Whether linear layers and the block's convolutions have biases.
        scale_input: Whether the output of the subsampling is multiplied by sqrt(D).
        context: Encoded frames that a frame attends to on its (left, right); -1 for all.
    """

    bins: int = 80
    width: int = 144
    layers: int = 4
    heads: int = 4
    subsampling: int = 8
    subsampling_channels: int = 64
    kernel: int = 9
    expansion: int = 4
    dropout: float = 0.1
    dropout_attention: float = 0.0
    dropout_input: float = 0.0
    dropout_positions: float = 0.0
    bias: bool = True
    scale_input: bool = False
    context: Context = (-1, -1)

    def __post_init__(self) -> None:
        expect_sizes(self, "bins width heads subsampling_channels expansion")
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        expect_heads(self)
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)
        context = tuple(self.context)  # JSON has lists
        valid = len(context) == 2 and all(whole(side, -1, MAX_CONTEXT) for side in context)
        expect(valid, "context", "(left, right) in encoder frames, -1 for all", context)
        object.__setattr__(self, "context", context)


class _Subsampling(nn.Module):
    """Strided 3 x 3 convolutions over time and frequency: one dense, then depthwise and pointwise.

    Channels are last throughout: (B, T, F, C). The first convolution and the pointwise ones are
    then matrix products over memory as it is; as convolutions they are up to 20 times slower on a
    CPU.
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        C = config.subsampling_channels
        halvings = config.subsampling.bit_length() - 1
        first = nn.Conv2d(1, C, 3, stride=2, padding=1)
        self.convs = nn.ModuleList([first])
        for _ in range(halvings - 1):
            depthwise = nn.Conv2d(C, C, 3, stride=2, padding=1, groups=C)
            pointwise = nn.Conv2d(C, C, 1)
            self.convs.append(nn.Sequential(depthwise, pointwise))
        self.out = nn.Linear(C * strided(config.bins, config.subsampling), config.width)

    def forward(self, features: Tensor, lengths: Tensor) -> Encoded:
        """Frames (B, T', D) of features (B, T, F), and their lengths (B,)."""
        first, *depthwise_pointwise = self.convs
        padded = F.pad(features, (1, 1, 1, 1))
        windows = padded.unfold(1, 3, 2).unfold(2, 3, 2).flatten(3)  # (B, T', F', 9)
        x, lengths = self._mix(windows, first, lengths)
        for pair in depthwise_pointwise:
            depthwise, pointwise = cast(nn.Sequential, pair)
            x = depthwise(x.permute(0, 3, 1, 2))  # (B, C, T, F)
            x = x.permute(0, 2, 3, 1)
            x, lengths = self._mix(x, pointwise, lengths)
        rows = x.transpose(2, 3).flatten(2)  # (B, T', C F')
        return self.out(rows), lengths

    def _mix(self, x: Tensor, conv: Any, lengths: Tensor) -> Encoded:
        """ReLU of `conv` over the last dimension of `x`, zero in the padding; halved lengths."""
        lengths = strided(lengths, 2)
        padding = to_device(~valid_mask(lengths, x.shape[1]), x.device)
        x = F.linear(x, conv.weight.flatten(1), conv.bias)
        x = x.masked_fill_(padding[:, :, None, None], 0.0)
        return x.relu_(), lengths


class ConformerBlock(nn.Module):
    """Feed-forward, attention, convolution, feed-forward (arXiv 2005.08100, 2.4).

    Both feed-forwards are added with weight 1/2.
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        D = config.width
        K = config.kernel
        bias = config.bias
        self.feed = nn.ModuleList(_feed_forward(config) for _ in range(2))
        self.attention_norm = nn.LayerNorm(D)
        dropout = config.dropout_attention
        self.attention = RelativeAttention(D, config.heads, dropout=dropout, bias=bias)
        self.conv_norm = nn.LayerNorm(D)
        self.gate = nn.Linear(D, 2 * D, bias=bias)
        self.depthwise = nn.Conv1d(D, D, K, padding=K // 2, groups=D, bias=bias)
        self.batch_norm = nn.BatchNorm1d(D)
        self.pointwise = nn.Linear(D, D, bias=bias)
        self.final_norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        valid: Tensor,
        positions: Tensor,
        context: Context = (-1, -1),
    ) -> Tensor:
        """Frames (B, T, D) after this block.

        Args:
            x: Frames (B, T, D).
            valid: True for frames outside the padding (B, T), bool.
            positions: `relative_positions(*distance_range(T, context), D, x)`.
            context: Frames that a frame attends to on its (left, right); -1 for all.
        """
        feed_before, feed_after = self.feed
        x = x.add(self.dropout(feed_before(x)), alpha=0.5)
        x = x + self.dropout(self.attention(self.attention_norm(x), valid, positions, context))
        x = x + self.dropout(self._convolution(x, valid))
        x = x.add(self.dropout(feed_after(x)), alpha=0.5)
        return self.final_norm(x)

    def _convolution(self, x: Tensor, valid: Tensor) -> Tensor:
        """The convolution module: (B, T, D) after its norm, GLU, and two convolutions."""
        gated = F.glu(self.gate(self.conv_norm(x)), -1)
        gated = gated.masked_fill_(~valid[..., None], 0.0)
        mixed = self.batch_norm(self.depthwise(gated.transpose(1, 2)))  # (B, D, T)
        return self.pointwise(F.silu(mixed, inplace=True).transpose(1, 2))


def _feed_forward(config: FastConformerConfig) -> nn.Sequential:
    D = config.width
    wide = D * config.expansion
    return nn.Sequential(
        nn.LayerNorm(D),
        nn.Linear(D, wide, bias=config.bias),
        nn.SiLU(inplace=True),
        nn.Dropout(config.dropout),
        nn.Linear(wide, D, bias=config.bias),
    )


class FastConformer(nn.Module):
    """Conformer blocks after a subsampling by depthwise strided convolutions.

    In eval mode the padding has no influence. In half precision (`.to(torch.bfloat16)`) everything
    is computed in that dtype: features are cast once, at the start. Only the angles of
    `relative_positions` need float32; norms and softmax sum in float32 inside torch.
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.subsampling = _Subsampling(config)
        self.blocks = nn.ModuleList(ConformerBlock(config) for _ in range(config.layers))
        self.input_dropout = nn.Dropout(config.dropout_input)
        self.position_dropout = nn.Dropout(config.dropout_positions)

    def forward(self, features: Tensor, lengths: Tensor) -> Encoded:
        """Encode a batch of features.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), 1 to T, int64, on the features' device or the
                host. Lengths on a GPU are not checked: reading them would wait for it.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,), on the device of `lengths`.
        """
        T = expect_batch(features, lengths, self.config.bins)
        valid = to_device(valid_mask(lengths, T), features.device)
        features = features.masked_fill(~valid[..., None], 0.0)
        x, lengths = self.subsampling(features.to(dtype_of(self)), lengths)
        valid = to_device(valid_mask(lengths, x.shape[1]), x.device)
        context = self.config.context
        positions = relative_positions(*distance_range(x.shape[1], context), self.width, x)
        positions = self.position_dropout(positions)
        if self.config.scale_input:
            x = x * math.sqrt(self.width)
        x = self.input_dropout(x)
        for block in self.blocks:
            x = block(x, valid, positions, context)
        return x.masked_fill(~valid[..., None], 0.0), lengths


def limit_context(model: nn.Module, context: Context) -> None:
    """Limit the attention of a FastConformer to near frames; its weights do not change.

    Memory and time then grow with T, not T², for long audio. A model trained with full context
    loses a little accuracy.

    Args:
        model: A FastConformer, or a model whose encoder is one. Changed in place.
        context: Encoded frames that a frame attends to on its (left, right); (-1, -1) for all.

    Raises:
        ValueError: `model` has no FastConformer.
    """
    encoder: Any = getattr(model, "encoder", model)
    expect(
        isinstance(encoder, FastConformer),
        "model",
        "one with a FastConformer",
        type(encoder).__name__,
    )
    encoder.config = replace(encoder.config, context=context)
    if model is not encoder:  # save_checkpoint writes the config of the model
        model.config = replace(model.config, encoder=encoder.config)  # type: ignore[type-var]
