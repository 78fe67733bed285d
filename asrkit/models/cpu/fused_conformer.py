"""A FastConformer for inference on a CPU, with the steps between products fused into the products.

`asrkit.models.optimize` makes it from an eager FastConformer. oneDNN computes activations and
residual sums with each product, before its result goes to memory. Masks are made once for all
blocks, and none where a batch has no padding.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.memory import return_free_memory
from asrkit.models.common import Encoded, expect_batch, padding_mask, strided
from asrkit.models.cpu.prepacked import (
    PrepackedDepthwise,
    PrepackedLinear,
    Step,
    multiply_by_group,
    prepack_by_group,
)
from asrkit.models.fastconformer import FastConformer
from asrkit.models.relative_attention import (
    Context,
    allowed_keys,
    attends_in_blocks,
    block_attention,
    distance_range,
    lowest,
    relative_positions,
)
from asrkit.shapes import expect, valid_mask

BLOCK = 16  # outputs that oneDNN computes at once
MAX_CACHED = 2**21  # numbers of projected positions that a block caches, in each of two forms
REACH = 128  # frames: utterances whose lengths round up to the same multiple share positions


class Frames(NamedTuple):
    """Masks and distances of a batch, for all blocks."""

    valid: Tensor  # (B, T) bool, False in the padding
    padding: Tensor | None  # (B, T, 1) bool, True in the padding; None without padding
    hidden: Tensor | None  # (B, 1, 1 or T, T) bool, True at keys that are masked; None without any
    context: Context
    distances: tuple[int, int]  # see `distance_range`
    in_blocks: bool  # see `attends_in_blocks`


class FusedFastConformer(nn.Module):
    """Computes what `FastConformer` computes in eval mode; without gradients and state_dict.

    Each part of the eager encoder is freed as soon as it is prepacked, so the two encoders are
    never both in memory. Weights of the blocks' linear layers are cast one by one to the dtype of
    the others.

    Args:
        encoder: The eager encoder with folded batch norms. It cannot be used afterwards.
        layer: Class of the blocks' linear layers, except that of the positions: `PrepackedLinear`
            or `asrkit.models.cpu.int8.Int8Linear`.
    """

    def __init__(self, encoder: FastConformer, layer: Any = PrepackedLinear) -> None:
        super().__init__()
        self.config = encoder.config
        self.width = encoder.width
        self.dtype = encoder.subsampling.out.weight.dtype
        self.subsampling = _Subsampling(encoder.subsampling)
        del encoder.subsampling
        self.blocks = nn.ModuleList()

        def packed(weight: Tensor, *others: Any) -> nn.Module:
            return layer(weight.to(self.dtype), *others)

        for number, block in enumerate(encoder.blocks):
            self.blocks.append(_Block(block, packed))
            encoder.blocks[number] = nn.Identity()
            return_free_memory()
        self.eval()

    @torch.no_grad()
    def forward(self, features: Tensor, lengths: Tensor) -> Encoded:
        """Encoded frames (B, T', D) and their lengths (B,), as `FastConformer.forward`.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64.
        """
        T = expect_batch(features, lengths, self.config.bins)
        expect(
            not self.training,
            "model",
            "eval mode: its steps are fused",
            "training mode",
            "Load it again to train it.",
        )
        padding = padding_mask(lengths, T, features.device)
        if padding is not None:
            features = features.masked_fill(padding[..., None], 0.0)
        x = self.subsampling(features.to(self.dtype), lengths)
        lengths = strided(lengths, self.config.subsampling)
        if self.config.scale_input:
            x = x * math.sqrt(self.width)
        context = self.config.context
        T = x.shape[1]
        valid = valid_mask(lengths, T)
        padding = None if bool(valid.all()) else ~valid[..., None]
        hidden = None
        if padding is not None or context != (-1, -1):
            hidden = ~allowed_keys(valid, context)
        in_blocks = attends_in_blocks(T, context)
        frames = Frames(valid, padding, hidden, context, distance_range(T, context), in_blocks)
        for block in self.blocks:
            x = block(x, frames)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        return x, lengths


class _Subsampling(Step):
    """The strided convolutions, channels last as in the eager ones."""

    def __init__(self, eager: Any) -> None:
        super().__init__()
        first, *pairs = eager.convs
        C = len(first.weight)
        self.first = PrepackedDepthwise(first.weight, first.bias, "relu", stride=2, groups=1)
        self.depthwise = nn.ModuleList()
        self.pointwise = nn.ModuleList()
        for depthwise, pointwise in pairs:
            self.depthwise.append(
                PrepackedDepthwise(depthwise.weight, depthwise.bias, stride=2, groups=C)
            )
            self.pointwise.append(
                PrepackedLinear(pointwise.weight.flatten(1), pointwise.bias, "relu")
            )
        # Columns by bin, then by channel, which is their order in memory.
        by_channel = eager.out.weight.unflatten(1, (C, -1))  # (D, C, F')
        by_bin = by_channel.transpose(1, 2).flatten(1)
        self.out = PrepackedLinear(by_bin, eager.out.bias)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Frames (B, T', D) of features (B, T, F). In the padding they are the last layer's bias.

        Utterances are computed one by one: the output of the first convolutions is the largest
        tensor of the encoder, and that of one utterance stays in caches, in memory that is reused.
        """
        images = features.unsqueeze(-1)  # (B, T, F, 1)
        frames = []
        for image, length in zip(images.split(1), lengths.tolist(), strict=True):
            length = math.ceil(length / 2)
            x = self.first(image)  # (1, T', F', C)
            x[:, length:] = 0.0
            for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
                length = math.ceil(length / 2)
                x = pointwise(depthwise(x))
                x[:, length:] = 0.0
            frames.append(self.out(x.flatten(2)))
        return torch.cat(frames)


def _norm(norm: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    """A layer norm with float32 weights.

    For bfloat16 frames torch then computes the same, 1.4 times as fast.
    """
    settings: dict[str, Any] = {
        "weight": norm.weight.float(),
        "bias": norm.bias.float(),
        "eps": norm.eps,
    }
    return partial(torch.layer_norm, normalized_shape=norm.normalized_shape, **settings)


class _Block(Step):
    """`ConformerBlock`, whose products add the residuals."""

    def __init__(self, block: Any, layer: Any) -> None:
        super().__init__()
        first, second = block.feed
        self.first_feed = _Feed(first, layer)
        self.attention_norm = _norm(block.attention_norm)
        self.attention = _Attention(block.attention, layer)
        self.conv_norm = _norm(block.conv_norm)
        self.gate = layer(block.gate.weight, block.gate.bias)
        conv = block.depthwise
        kernel = conv.weight.unsqueeze(2)  # for images one pixel high
        self.depthwise = PrepackedDepthwise(kernel, conv.bias, "swish", groups=conv.groups)
        self.pointwise = layer(block.pointwise.weight, block.pointwise.bias)
        self.second_feed = _Feed(second, layer)
        self.final_norm = _norm(block.final_norm)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        """Frames (B, T, D) after this block."""
        x = self.first_feed(x)
        x = self.attention(self.attention_norm(x), x, frames)
        gated = F.glu(self.gate(self.conv_norm(x)), -1)
        if frames.padding is not None:
            gated = gated.masked_fill_(frames.padding, 0.0)
        image = gated.unsqueeze(1)  # (B, 1, T, D), one pixel high
        mixed = self.depthwise(image).squeeze(1)
        x = self.pointwise.plus(mixed, x)
        x = self.second_feed(x)
        return self.final_norm(x)


class _Feed(Step):
    """Half a feed-forward layer and its residual; its last weights include the factor of 1/2."""

    def __init__(self, feed: Any, layer: Any) -> None:
        super().__init__()
        norm, wide, _, _, narrow = feed
        self.norm = _norm(norm)
        self.wide = layer(wide.weight, wide.bias, "swish")
        bias = None if narrow.bias is None else 0.5 * narrow.bias
        self.narrow = layer(0.5 * narrow.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Frames (B, T, D) of frames x (B, T, D)."""
        return self.narrow.plus(self.wide(self.norm(x)), x)


class _Attention(Step):
    """`RelativeAttention` that adds its result to a residual.

    The product that computes the queries adds the content bias too; `bias_difference` is the
    position bias minus the content bias.
    """

    def __init__(self, eager: Any, layer: Any) -> None:
        super().__init__()
        self.heads = eager.heads
        content = eager.content_bias.flatten()
        bias = F.pad(content, (0, 2 * len(content)))  # of queries, keys and values
        if eager.qkv.bias is not None:
            bias = bias + eager.qkv.bias
        self.qkv = layer(eager.qkv.weight, bias)
        difference = eager.position_bias.detach() - eager.content_bias.detach()
        self.bias_difference = difference[:, 0]  # (H, D/H)
        self.position = PrepackedLinear(eager.position.weight.to(difference.dtype), None)
        self.prepacked: tuple[tuple[int, int, int], Tensor] | None = None  # see `_positions`
        self.projected: tuple[int, Tensor] | None = None  # see `_projected`
        self.out = layer(eager.out.weight, eager.out.bias)

    def forward(self, x: Tensor, residual: Tensor, frames: Frames) -> Tensor:
        """`residual` (B, T, D) plus the attended frames of x (B, T, D)."""
        B, T, _ = x.shape
        H = self.heads
        qkv = self.qkv(x).view(B, T, 3, H, -1)
        q, k, v = qkv.unbind(2)  # each (B, T, H, D/H); q includes the content bias
        first, last = frames.distances
        p = self._positions(x, first, last)
        queries = (q + self.bias_difference).view(B * T, -1)
        scores = multiply_by_group(queries, p, H).view(B, T, H, -1)  # by distance
        if frames.in_blocks:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # each (B, H, T, D/H)
            scores = scores[..., : first - last + 1].transpose(1, 2).contiguous()
            mixed = block_attention(q, k, v, scores, frames.valid, frames.context)
        else:
            mixed = _attend(qkv, _by_key(scores), frames.hidden)
        return self.out.plus(mixed, residual)

    def _positions(self, x: Tensor, first: int, last: int) -> Tensor:
        """Projected positions over sqrt(D/H), prepacked to be multiplied with all frames of x.

        Zeros fill them up to whole blocks of outputs. Those of the last shape are cached: they
        depend on the weights and the shape alone.
        """
        shape = (x.shape[0] * x.shape[1], first, last)
        cached = self.prepacked  # read once: another thread may change it
        if cached is not None and cached[0] == shape:
            return cached[1]
        p = self._projected(x, first, last).unflatten(1, (self.heads, -1)).transpose(0, 1)
        blocks = F.pad(p, (0, 0, 0, -p.shape[1] % BLOCK))  # (H, P, D/H)
        prepacked = prepack_by_group(blocks, shape[0])
        if prepacked.numel() <= MAX_CACHED:
            self.prepacked = shape, prepacked
        return prepacked

    def _projected(self, x: Tensor, first: int, last: int) -> Tensor:
        """Projected positions over sqrt(D/H) of the distances from `first` to `last`: (P, D).

        They are a part of the positions of a multiple of REACH frames, which are cached for the
        next length: for one utterance of 10 s they are 7 % of all products. The numbers depend on
        the length alone, not on earlier calls, so a recording gets the same ones in every order.
        """
        reach = max(first, 1 - last)
        reach += -reach % REACH
        cached = self.projected
        if cached is None or cached[0] != reach:
            p = self.position(relative_positions(reach, 1 - reach, x.shape[2], x))
            cached = reach, p / math.sqrt(p.shape[1] // self.heads)
            if p.numel() <= MAX_CACHED:
                self.projected = cached
        return cached[1][reach - first : reach - last + 1]


def _by_key(scores: Tensor) -> Tensor:
    """Scores by key (B, H, T, T), a view of scores by distance (B, T, H, 2T or more).

    Row t begins T - t columns into its distances, T ... 1 - T.
    """
    B, T, H, _ = scores.shape
    utterance, row, head, column = scores.stride()
    return scores.as_strided((B, H, T, T), (utterance, head, row - column, column), T)


def _attend(qkv: Tensor, bias: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention (B, T, D) of queries, keys and values (B, T, 3, H, D/H).

    Utterances are computed one by one, so that their scores stay in caches. Each is copied to be
    contiguous by head, which makes the products faster. Products and softmax are separate steps:
    for some hundred frames torch's fused attention takes longer on a CPU, 1.4 times in bfloat16 for
    125 frames and 2 times for 400. The softmax is computed in float32, which is faster than torch's
    in bfloat16.

    Args:
        qkv: Queries, keys and values.
        bias: Numbers that are added to the scores (B, H, T, T).
        hidden: True at masked keys, as in `Frames`.
    """
    B, T, _, H, width = qkv.shape
    scale = 1 / math.sqrt(width)
    mixed = qkv.new_empty(B, T, H, width)
    for b in range(B):
        q, k, v = qkv[b].permute(1, 2, 0, 3).contiguous().unbind()  # each (H, T, D/H)
        scores = torch.baddbmm(bias[b], q, k.transpose(1, 2), alpha=scale)
        if hidden is not None:
            scores = scores.masked_fill_(hidden[b], lowest(scores.dtype))
        shares = scores.softmax(-1, torch.float32).to(v.dtype)
        torch.bmm(shares, v, out=mixed[b].transpose(0, 1))
    return mixed.flatten(2)
