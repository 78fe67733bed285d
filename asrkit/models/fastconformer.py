"""FastConformer: log-mel features (B, T, F) in, encoded frames (B, T', D) out, T' = T /
subsampling, rounded up.
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
    """FastConformer (arXiv 2305.05084); `asrkit.models.presets` has the published sizes.

    `context` is how many encoder frames a frame attends to on its left and right; -1 is all. `bias`
    is that of linear layers and of the block's convolutions; `scale_input` multiplies what leaves
    the subsampling by sqrt(D). Dropouts are shares of 1.
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
        sizes = (
            self.bins,
            self.width,
            self.heads,
            self.subsampling_channels,
            self.kernel,
            self.expansion,
        )
        expect(
            all(whole(size, 1) for size in sizes) and whole(self.layers, 0),
            "config",
            "sizes of at least 1",
            self,
        )
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        expect(
            self.width % self.heads == 0, "heads", f"a divisor of width {self.width}", self.heads
        )
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)
        shares = self.dropout, self.dropout_attention, self.dropout_input, self.dropout_positions
        expect(
            all(0 <= share < 1 for share in shares), "dropout", "shares from 0 to below 1", shares
        )
        sides = (
            isinstance(self.context, tuple | list)
            and len(self.context) == 2
            and all(whole(side, -1) for side in self.context)
        )
        expect(sides, "context", "(left, right) in encoder frames, -1 for all", self.context)
        object.__setattr__(self, "context", tuple(self.context))  # JSON brings lists


class _Subsampling(nn.Module):
    """Strided 3 x 3 convolutions over time and frequency; all but the first are depthwise, then
    pointwise.

    Channels lie last throughout: (B, T, F, C). The first convolution and the pointwise ones are
    then matrix products of what is in memory already; as convolutions over one channel they are up
    to 20 times slower on a CPU.
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        C, halvings, bins = (
            config.subsampling_channels,
            int(math.log2(config.subsampling)),
            config.bins,
        )
        self.convs = nn.ModuleList([nn.Conv2d(1, C, 3, stride=2, padding=1)])
        for _ in range(halvings - 1):
            self.convs.append(nn.Sequential(nn.Conv2d(C, C, 3, 2, 1, groups=C), nn.Conv2d(C, C, 1)))
        for _ in range(halvings):
            bins = (bins - 1) // 2 + 1
        self.out = nn.Linear(C * bins, config.width)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        # A GPU's tensor cores want rows of 16 bytes or a multiple: windows of 4 x 4, the last row
        # and column times zero.
        side = 4 if features.is_cuda else 3
        x, lengths = self._mix(_windows(features, side), self.convs[0], lengths, side)
        pairs: Any = self.convs[1:]
        for depthwise, pointwise in pairs:
            x, lengths = self._mix(
                depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), pointwise, lengths
            )
        return self.out(x.transpose(2, 3).flatten(2)), lengths

    def _mix(self, x: Tensor, conv: Any, lengths: Tensor, side: int = 1) -> tuple[Tensor, Tensor]:
        """What `conv` makes of the last dimension, zero in the padding that half the frames leave
        of `lengths`.
        """
        lengths = halve(lengths)
        padding = ~valid_mask(lengths, x.shape[1])[:, :, None, None]
        more = side - conv.weight.shape[-1]
        weight = F.pad(conv.weight, (0, more, 0, more)) if more else conv.weight
        return F.linear(x, weight.flatten(1), conv.bias).masked_fill_(padding, 0.0).relu_(), lengths


def _windows(features: Tensor, side: int) -> Tensor:
    """What lies around every second frame and bin of features (B, T, F): (B, T', F', side side),
    side 3 or 4.
    """
    more = side - 2
    return F.pad(features, (1, more, 1, more)).unfold(1, side, 2).unfold(2, side, 2).flatten(3)


def relative_positions(first: int, last: int, D: int, like: Tensor) -> Tensor:
    """Sinusoids of the distances first, first - 1, ..., last, as (first - last + 1, D) in the dtype
    and on the device of `like`.

    arXiv 1706.03762, section 3.5, sine and cosine interleaved. Made in float32: half precision
    cannot count past 256 frames.
    """
    distance = torch.arange(first, last - 1, -1, device=like.device, dtype=torch.float32)[:, None]
    angle = distance * torch.exp(
        torch.arange(0, D, 2, device=like.device) * (-math.log(10_000) / D)
    )
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :D].to(like.dtype)


class RelativeAttention(nn.Module):
    """Multi-head attention with Transformer-XL positions (arXiv 1901.02860, equation in section
    3.3).

    `kept`: where the projections of positions stay for the next call, if whoever sets it promises
    to edit no weight. None, as at
    birth: they are made in every call, so any edit counts.
    """

    kept: Kept | None = None

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        D, self.heads, self.dropout = config.width, config.heads, config.dropout_attention
        self.qkv, self.out = (
            nn.Linear(D, 3 * D, bias=config.bias),
            nn.Linear(D, D, bias=config.bias),
        )
        self.position = nn.Linear(D, D, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(self.heads, 1, D // self.heads))
        self.position_bias = nn.Parameter(torch.zeros(self.heads, 1, D // self.heads))

    def forward(
        self, x: Tensor, valid: Tensor, positions: Tensor, context: tuple[int, int]
    ) -> Tensor:
        """(B, T, D) from frames (B, T, D), valid (B, T) and the positions that `attended` names for
        T and `context`.
        """
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).unbind(2)  # each (B, T, H, D/H)
        p = self.projected(positions, attended(T, context))  # (H, D/H, P)
        # Heads are the batch of the product, so that P is not copied for every utterance; neither
        # is q, read with a stride.
        by_head = (q + self.position_bias[:, 0]).flatten(0, 1).transpose(0, 1)  # (H, B T, D/H)
        scores = (
            (by_head @ p).view(self.heads, B, T, -1).transpose(0, 1)
        )  # (B, H, T, P), by distance
        attend = self._near if _blocked(T, context) else self._everywhere
        q, k, v = (
            (q + self.content_bias[:, 0]).transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
        )  # (B, H, T, D/H)
        return self.out(attend(q, k, v, scores, valid, context))

    def projected(self, positions: Tensor, distances: tuple[int, int]) -> Tensor:
        """Projections of `positions`, those of `distances`, over the root of D/H: (H, D/H, P). See
        `kept`.
        """

        def project() -> Tensor:
            p = self.position(positions).view(len(positions), self.heads, -1)
            return (p / math.sqrt(p.shape[-1])).permute(1, 2, 0)

        if self.kept is None or self.training:  # in training positions are dropped at random
            return project()
        return self.kept.value(
            self.position.weight, (distances, positions.dtype, positions.device), project
        )

    def _everywhere(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        valid: Tensor,
        context: tuple[int, int],
    ) -> Tensor:
        B, H, T, _ = q.shape
        left, right = context
        # Row t begins T - t columns into its distances, T ... 1 - T: one long row, read with a
        # stride of 2T - 1. A view.
        bias = scores.flatten(-2)[..., T:].view(B, H, T, 2 * T - 1)[..., :T]
        allowed = valid[:, None, None, :]  # (B, 1, 1, T)
        if left >= 0 or right >= 0:
            distance = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
            near = (distance <= (left if 0 <= left < T else T)) & (
                -distance <= (right if 0 <= right < T else T)
            )
            allowed = allowed & near
        bias = torch.where(allowed, bias, _never(bias))
        return self._attention(q, k, v, bias).transpose(1, 2).flatten(2)

    def _near(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        valid: Tensor,
        context: tuple[int, int],
    ) -> Tensor:
        """Blocks of C = left + right queries against the W = C + left + right keys around them:
        memory grows with T, not T².
        """
        B, H, T, _ = q.shape
        left, right = context
        C = max(left + right, 1)
        N, W = -(-T // C), C + left + right
        after = N * C - T
        q, scores = (
            F.pad(part, (0, 0, 0, after)).view(B, H, N, C, -1) for part in (q, scores)
        )  # (B, H, N, C, D/H or P)
        # Looked up: of keys unfolded into windows that overlap, torch.compile's inductor (2.11)
        # makes wrong gradients.
        at = torch.arange(N, device=k.device)[:, None] * C + torch.arange(W, device=k.device)
        k, v = (
            F.pad(part, (0, 0, left, after + right))[:, :, at] for part in (k, v)
        )  # (B, H, N, W, D/H)
        # Query a of a block begins a keys later: its row of P = left + right + 1 distances moves a
        # columns to the right.
        bias = F.pad(scores, (0, C), value=_never(scores)).flatten(-2)[..., :-C].view(B, H, N, C, W)
        allowed = F.pad(valid, (left, after + right)).unfold(1, W, C)[
            :, None, :, None, :
        ]  # (B, 1, N, 1, W)
        bias = torch.where(allowed, bias, _never(bias))
        q, k, v, bias = (
            part.transpose(1, 2).flatten(0, 1) for part in (q, k, v, bias)
        )  # (B N, H, ...)
        return self._attention(q, k, v, bias).transpose(1, 2).reshape(B, N * C, -1)[:, :T]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, bias, dropout_p=self.dropout if self.training else 0.0
        )


def _never(scores: Tensor) -> float:
    return (
        torch.finfo(scores.dtype).min / 2
    )  # half of it: in float16 the sum with a score must not become infinite


def _blocked(T: int, context: tuple[int, int]) -> bool:
    return min(context) >= 0 and 2 * sum(context) < T


def attended(T: int, context: tuple[int, int]) -> tuple[int, int]:
    """First and last distance that attention over T frames asks `relative_positions` for."""
    return (context[0], -context[1]) if _blocked(T, context) else (T, 1 - T)


class ConformerBlock(nn.Module):
    """Half a feed-forward layer, attention, convolution, the other half (arXiv 2005.08100, section
    2.4).
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        D, wide, bias = config.width, config.width * config.expansion, config.bias
        self.feed = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(D),
                nn.Linear(D, wide, bias=bias),
                nn.SiLU(inplace=True),
                nn.Dropout(config.dropout),
                nn.Linear(wide, D, bias=bias),
            )
            for _ in range(2)
        )
        self.attention_norm, self.attention = nn.LayerNorm(D), RelativeAttention(config)
        self.conv_norm, self.gate = nn.LayerNorm(D), nn.Linear(D, 2 * D, bias=bias)
        self.depthwise = nn.Conv1d(
            D, D, config.kernel, padding=config.kernel // 2, groups=D, bias=bias
        )
        self.batch_norm, self.pointwise = nn.BatchNorm1d(D), nn.Linear(D, D, bias=bias)
        self.final_norm, self.dropout = nn.LayerNorm(D), nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, valid: Tensor, positions: Tensor, context: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        """(B, T, D) from frames (B, T, D), valid (B, T), and `relative_positions(*attended(T,
        context), D, x)`.
        """
        x = x + 0.5 * self.dropout(self.feed[0](x))
        x = x + self.dropout(self.attention(self.attention_norm(x), valid, positions, context))
        y = F.glu(self.gate(self.conv_norm(x)), -1).masked_fill_(~valid[..., None], 0.0)
        x = x + self.dropout(self.pointwise(self._over_time(y)))
        return self.final_norm(x + 0.5 * self.dropout(self.feed[1](x)))

    def _over_time(self, y: Tensor) -> Tensor:
        """Depthwise convolution, norm, activation; as an image one pixel high, so that (B, T, D)
        need not be transposed.
        """
        conv = self.depthwise
        image = y.transpose(1, 2).unsqueeze(2)  # (B, D, 1, T)
        out = F.conv2d(
            image,
            conv.weight.unsqueeze(2),
            conv.bias,
            padding=(0, conv.kernel_size[0] // 2),
            groups=conv.groups,
        )
        out = out.squeeze(2).transpose(1, 2)  # (B, T, D)
        return F.silu(self.batch_norm(out.flatten(0, 1)), inplace=True).view(y.shape)


class FastConformer(nn.Module):
    """Conformer blocks behind a depthwise-striding subsampling. In eval mode nothing in the padding
    matters.

    In half precision (`.to(torch.bfloat16)`) all of it computes in that dtype: features are cast
    once, at the door. Accuracy needs float32 in one place only, the angles of `relative_positions`;
    norms and softmax add up in float32 inside torch.
    """

    def __init__(self, config: FastConformerConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        self.subsampling = _Subsampling(config)
        self.blocks = nn.ModuleList(ConformerBlock(config) for _ in range(config.layers))
        self.input_dropout, self.position_dropout = (
            nn.Dropout(config.dropout_input),
            nn.Dropout(config.dropout_positions),
        )

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,), of lengths 1..T, which are not looked
        at: a GPU would have to wait.
        """
        B, T, _ = dims(features, "B T F", "features", F=self.config.bins)
        dims(lengths, "B", "lengths", B=B)
        expect(
            B > 0 and T > 0, "features", "an utterance and a frame at least", tuple(features.shape)
        )
        features = features.masked_fill(~valid_mask(lengths, T)[..., None], 0.0)
        x, lengths = self.subsampling(features.to(self.subsampling.out.weight.dtype), lengths)
        valid, context = valid_mask(lengths, x.shape[1]), self.config.context
        positions = self.position_dropout(
            relative_positions(*attended(x.shape[1], context), self.width, x)
        )
        x = self.input_dropout(x * math.sqrt(self.width) if self.config.scale_input else x)
        for block in self.blocks:
            x = block(x, valid, positions, context)
        return x.masked_fill(~valid[..., None], 0.0), lengths


def limit_context(model: nn.Module, context: tuple[int, int]) -> None:
    """Let the FastConformer of `model` attend to (left, right) encoder frames only; weights stay.
    (-1, -1): to all again.

    Memory and time of long audio then grow with T, not T²; a model trained on full context loses a
    little accuracy.
    """
    encoder: Any = getattr(model, "encoder", model)
    expect(
        isinstance(encoder, FastConformer),
        "model",
        "one with a FastConformer",
        type(encoder).__name__,
    )
    encoder.config = replace(encoder.config, context=context)
    if model is not encoder:  # what save_checkpoint writes
        model.config = replace(model.config, encoder=encoder.config)  # type: ignore[type-var]
