"""FastConformer (arXiv 2305.05084): the encoder of the Parakeet models.

Log-mel features (B, T, F) in; encoded frames (B, T', D) out, with T' = ceil(T / subsampling).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.models.encoders import halve
from asrkit.models.kept import Kept
from asrkit.shapes import dims, expect, expect_types, valid_mask, whole


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
        expansion: Width of a feed-forward layer over `width`.
        dropout: Share dropped behind every part of a block, in training.
        dropout_attention: Share of attention weights dropped.
        dropout_input: Share dropped behind the subsampling.
        dropout_positions: Share dropped of the relative positions.
        bias: Whether linear layers and the block's convolutions have biases.
        scale_input: Whether the subsampling's output is multiplied by sqrt(D).
        context: Encoded frames that a frame attends to on its (left, right); -1 is all.
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
    context: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        expect_types(self)
        sizes = [self.bins, self.width, self.heads]
        sizes += [self.subsampling_channels, self.kernel, self.expansion]
        valid = all(whole(size, 1) for size in sizes) and whole(self.layers, 0)
        expect(valid, "config", "sizes of at least 1", self)
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        divides = self.width % self.heads == 0
        expect(divides, "heads", f"a divisor of width {self.width}", self.heads)
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)
        shares = (
            self.dropout,
            self.dropout_attention,
            self.dropout_input,
            self.dropout_positions,
        )
        valid = all(0 <= share < 1 for share in shares)
        expect(valid, "dropout", "shares from 0 to below 1", shares)
        valid = (
            isinstance(self.context, tuple | list)
            and len(self.context) == 2
            and all(whole(side, -1) for side in self.context)
        )
        expect(valid, "context", "(left, right) in encoder frames, -1 for all", self.context)
        object.__setattr__(self, "context", tuple(self.context))  # JSON brings lists


class _Subsampling(nn.Module):
    """Strided 3 x 3 convolutions over time and frequency: one dense, then depthwise and pointwise.

    Channels lie last throughout: (B, T, F, C). The first convolution and the pointwise ones are
    then products of matrices that are in memory already; as convolutions over one channel they are
    up to 20 times slower on a CPU.
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        C = config.subsampling_channels
        halvings = int(math.log2(config.subsampling))
        self.convs = nn.ModuleList([nn.Conv2d(1, C, 3, stride=2, padding=1)])
        for _ in range(halvings - 1):
            depthwise = nn.Conv2d(C, C, 3, stride=2, padding=1, groups=C)
            self.convs.append(nn.Sequential(depthwise, nn.Conv2d(C, C, 1)))
        bins = config.bins
        for _ in range(halvings):
            bins = (bins - 1) // 2 + 1
        self.out = nn.Linear(C * bins, config.width)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        # A GPU's tensor cores want rows of 16 bytes or a multiple: windows of 4 x 4, whose last row
        # and column are multiplied by zero.
        side = 4 if features.is_cuda else 3
        x, lengths = self._mix(_windows(features, side), self.convs[0], lengths, side)
        depthwise_pointwise: Any = self.convs[1:]
        for depthwise, pointwise in depthwise_pointwise:
            x = depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            x, lengths = self._mix(x, pointwise, lengths)
        return self.out(x.transpose(2, 3).flatten(2)), lengths

    def _mix(self, x: Tensor, conv: Any, lengths: Tensor, side: int = 1) -> tuple[Tensor, Tensor]:
        """ReLU of `conv` over the last dimension of `x`, zero behind the halved lengths.

        The kernel of `conv` is padded with zeros to `side` x `side`.
        """
        lengths = halve(lengths)
        padding = ~valid_mask(lengths, x.shape[1])[:, :, None, None]
        weight = conv.weight
        more = side - weight.shape[-1]
        if more:
            weight = F.pad(weight, (0, more, 0, more))
        x = F.linear(x, weight.flatten(1), conv.bias)
        return x.masked_fill_(padding, 0.0).relu_(), lengths


def _windows(features: Tensor, side: int) -> Tensor:
    """Windows of `side` x `side` (3 or 4) around every second frame and bin of features (B, T, F).

    Returns (B, T', F', side * side).
    """
    more = side - 2
    padded = F.pad(features, (1, more, 1, more))
    return padded.unfold(1, side, 2).unfold(2, side, 2).flatten(3)


def relative_positions(first: int, last: int, D: int, like: Tensor) -> Tensor:
    """Sinusoids of relative positions, sine and cosine interleaved (arXiv 1706.03762, section 3.5).

    Computed in float32: half precision cannot count past 256 frames.

    Args:
        first: The first distance, in frames; distances fall by one to `last`.
        last: The last distance.
        D: Width of a position.
        like: A tensor whose device and dtype the result has.

    Returns:
        (first - last + 1, D).
    """
    distances = torch.arange(first, last - 1, -1, device=like.device, dtype=torch.float32)
    exponents = torch.arange(0, D, 2, device=like.device) * (-math.log(10_000) / D)
    angles = distances[:, None] * torch.exp(exponents)
    pairs = torch.stack([angles.sin(), angles.cos()], -1)
    return pairs.flatten(1)[:, :D].to(like.dtype)


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions (arXiv 1901.02860, section 3.3).

    `kept` holds the projected positions between calls. It is None at first, and then they are
    computed in every call; `asrkit.models.optimize` sets it, which promises that no weight changes.
    """

    kept: Kept | None = None

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.dropout = config.dropout_attention
        self.qkv = nn.Linear(D, 3 * D, bias=config.bias)
        self.out = nn.Linear(D, D, bias=config.bias)
        self.position = nn.Linear(D, D, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(self.heads, 1, D // self.heads))
        self.position_bias = nn.Parameter(torch.zeros(self.heads, 1, D // self.heads))

    def forward(
        self, x: Tensor, valid: Tensor, positions: Tensor, context: tuple[int, int]
    ) -> Tensor:
        """Attended frames (B, T, D).

        Args:
            x: Frames (B, T, D).
            valid: Which frames are no padding (B, T), bool.
            positions: `relative_positions` of the distances that `attended(T, context)` names.
            context: Frames that a frame attends to on its (left, right); -1 is all.
        """
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).unbind(2)  # each (B, T, H, D/H)
        p = self.projected(positions, attended(T, context))  # (H, D/H, P)
        # Heads are the batch of this product, so that neither P is copied for every utterance nor
        # q, which is read with a stride.
        by_head = (q + self.position_bias[:, 0]).flatten(0, 1).transpose(0, 1)  # (H, B T, D/H)
        scores = (by_head @ p).view(self.heads, B, T, -1).transpose(0, 1)  # (B, H, T, P)
        q = (q + self.content_bias[:, 0]).transpose(1, 2)  # (B, H, T, D/H)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        attend = self._in_blocks if _blocked(T, context) else self._everywhere
        return self.out(attend(q, k, v, scores, valid, context))

    def projected(self, positions: Tensor, distances: tuple[int, int]) -> Tensor:
        """Projected positions over sqrt(D/H), (H, D/H, P); see `kept`.

        Args:
            positions: `relative_positions` (P, D).
            distances: The first and last distance that they stand for.
        """

        def project() -> Tensor:
            p = self.position(positions).view(len(positions), self.heads, -1)
            return (p / math.sqrt(p.shape[-1])).permute(1, 2, 0)

        if self.kept is None or self.training:  # in training positions are dropped at random
            return project()
        key = (distances, positions.dtype, positions.device)
        return self.kept.value(self.position.weight, key, project)

    def _everywhere(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        valid: Tensor,
        context: tuple[int, int],
    ) -> Tensor:
        """Attention of every frame to every other, those outside `context` masked: (B, T, D)."""
        B, H, T, _ = q.shape
        left, right = context
        # Row t begins T - t columns into its distances, T ... 1 - T. Seen as one long row, that is
        # a stride of 2T - 1: a view, nothing is copied.
        bias = scores.flatten(-2)[..., T:].view(B, H, T, 2 * T - 1)[..., :T]
        allowed = valid[:, None, None, :]  # (B, 1, 1, T)
        if left >= 0 or right >= 0:
            frames = torch.arange(T, device=q.device)
            distance = frames[:, None] - frames
            furthest_left = left if 0 <= left < T else T
            furthest_right = right if 0 <= right < T else T
            near = (distance <= furthest_left) & (-distance <= furthest_right)
            allowed = allowed & near
        bias = torch.where(allowed, bias, _lowest(bias))
        return self._attention(q, k, v, bias).transpose(1, 2).flatten(2)

    def _in_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        valid: Tensor,
        context: tuple[int, int],
    ) -> Tensor:
        """Attention of blocks of queries to the keys around them: (B, T, D).

        A block of C = left + right queries sees W = C + left + right keys, so memory grows with T
        and not with T².
        """
        B, H, T, _ = q.shape
        left, right = context
        C = max(left + right, 1)
        N = -(-T // C)  # blocks
        W = C + left + right
        after = N * C - T
        q = F.pad(q, (0, 0, 0, after)).view(B, H, N, C, -1)
        scores = F.pad(scores, (0, 0, 0, after)).view(B, H, N, C, -1)  # (B, H, N, C, P)
        # Looked up, not unfolded: of keys unfolded into windows that overlap, torch.compile's
        # inductor (2.11) computes wrong gradients.
        blocks = torch.arange(N, device=k.device)[:, None] * C
        window = blocks + torch.arange(W, device=k.device)
        k = F.pad(k, (0, 0, left, after + right))[:, :, window]  # (B, H, N, W, D/H)
        v = F.pad(v, (0, 0, left, after + right))[:, :, window]
        # Query c of a block begins c keys later: its row of P = left + right + 1 distances moves c
        # columns to the right.
        bias = F.pad(scores, (0, C), value=_lowest(scores)).flatten(-2)
        bias = bias[..., :-C].view(B, H, N, C, W)
        allowed = F.pad(valid, (left, after + right)).unfold(1, W, C)  # (B, N, W)
        bias = torch.where(allowed[:, None, :, None, :], bias, _lowest(bias))
        blocks_first = [part.transpose(1, 2).flatten(0, 1) for part in (q, k, v, bias)]
        out = self._attention(*blocks_first)  # (B N, H, C, D/H)
        return out.transpose(1, 2).reshape(B, N * C, -1)[:, :T]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout)


def _lowest(scores: Tensor) -> float:
    """The bias of a key that must not be seen: half the lowest number of the dtype.

    Half of it, for in float16 the sum with a score must not become infinite.
    """
    return torch.finfo(scores.dtype).min / 2


def _blocked(T: int, context: tuple[int, int]) -> bool:
    """Whether attention over T frames is computed in blocks: where `context` is short against T."""
    return min(context) >= 0 and 2 * sum(context) < T


def attended(T: int, context: tuple[int, int]) -> tuple[int, int]:
    """First and last distance, in frames, that attention over T frames asks positions for."""
    if _blocked(T, context):
        left, right = context
        return left, -right
    return T, 1 - T


class ConformerBlock(nn.Module):
    """Half a feed-forward layer, attention, convolution, the other half (arXiv 2005.08100, 2.4)."""

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        D = config.width
        bias = config.bias
        self.feed = nn.ModuleList(_feed_forward(config) for _ in range(2))
        self.attention_norm = nn.LayerNorm(D)
        self.attention = RelativeAttention(config)
        self.conv_norm = nn.LayerNorm(D)
        self.gate = nn.Linear(D, 2 * D, bias=bias)
        padding = config.kernel // 2
        self.depthwise = nn.Conv1d(D, D, config.kernel, padding=padding, groups=D, bias=bias)
        self.batch_norm = nn.BatchNorm1d(D)
        self.pointwise = nn.Linear(D, D, bias=bias)
        self.final_norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, valid: Tensor, positions: Tensor, context: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        """Frames (B, T, D) after this block.

        Args:
            x: Frames (B, T, D).
            valid: Which frames are no padding (B, T), bool.
            positions: `relative_positions(*attended(T, context), D, x)`.
            context: Frames that a frame attends to on its (left, right); -1 is all.
        """
        x = x + 0.5 * self.dropout(self.feed[0](x))
        x = x + self.dropout(self.attention(self.attention_norm(x), valid, positions, context))
        gated = F.glu(self.gate(self.conv_norm(x)), -1).masked_fill_(~valid[..., None], 0.0)
        x = x + self.dropout(self.pointwise(self._convolve(gated)))
        return self.final_norm(x + 0.5 * self.dropout(self.feed[1](x)))

    def _convolve(self, x: Tensor) -> Tensor:
        """Depthwise convolution over time, norm and activation of (B, T, D).

        Computed as an image one pixel high, so that (B, T, D) need not be transposed in memory.
        """
        conv = self.depthwise
        image = x.transpose(1, 2).unsqueeze(2)  # (B, D, 1, T)
        weight = conv.weight.unsqueeze(2)
        padding = (0, conv.kernel_size[0] // 2)
        out = F.conv2d(image, weight, conv.bias, padding=padding, groups=conv.groups)
        out = out.squeeze(2).transpose(1, 2)  # (B, T, D)
        return F.silu(self.batch_norm(out.flatten(0, 1)), inplace=True).view(x.shape)


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
    """Conformer blocks behind a subsampling by depthwise strided convolutions.

    In eval mode nothing that lies in the padding matters. In half precision
    (`.to(torch.bfloat16)`) all of it computes in that dtype: features are cast once, at the door.
    Accuracy needs float32 in one place only, the angles of `relative_positions`; norms and softmax
    add up in float32 inside torch.
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.subsampling = _Subsampling(config)
        self.blocks = nn.ModuleList(ConformerBlock(config) for _ in range(config.layers))
        self.input_dropout = nn.Dropout(config.dropout_input)
        self.position_dropout = nn.Dropout(config.dropout_positions)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch of features.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), 1 to T, int64. They are not checked: a GPU
                would have to be waited for.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,).
        """
        B, T, _ = dims(features, "B T F", "features", F=self.config.bins)
        dims(lengths, "B", "lengths", B=B)
        shape = tuple(features.shape)
        expect(B > 0 and T > 0, "features", "an utterance and a frame at least", shape)
        features = features.masked_fill(~valid_mask(lengths, T)[..., None], 0.0)
        x, lengths = self.subsampling(features.to(self.subsampling.out.weight.dtype), lengths)
        frames = x.shape[1]
        valid = valid_mask(lengths, frames)
        context = self.config.context
        positions = relative_positions(*attended(frames, context), self.width, x)
        positions = self.position_dropout(positions)
        if self.config.scale_input:
            x = x * math.sqrt(self.width)
        x = self.input_dropout(x)
        for block in self.blocks:
            x = block(x, valid, positions, context)
        return x.masked_fill(~valid[..., None], 0.0), lengths


def limit_context(model: nn.Module, context: tuple[int, int]) -> None:
    """Let the FastConformer of `model` attend to near frames only; weights stay as they are.

    Memory and time of long audio then grow with T, not T²; a model trained on full context loses a
    little accuracy.

    Args:
        model: A FastConformer, or a model whose encoder is one. Changed in place.
        context: Encoded frames that a frame attends to on its (left, right); (-1, -1) is all.

    Raises:
        ValueError: `model` has no FastConformer.
    """
    encoder: Any = getattr(model, "encoder", model)
    fits = isinstance(encoder, FastConformer)
    expect(fits, "model", "one with a FastConformer", type(encoder).__name__)
    encoder.config = replace(encoder.config, context=context)
    if model is not encoder:  # the config that save_checkpoint writes
        model.config = replace(model.config, encoder=encoder.config)  # type: ignore[type-var]
