"""A FastConformer for inference on a CPU, whose steps between products are part of the products.

`pack_conformer` makes it of an eager FastConformer. Activations and residual sums are computed by
oneDNN behind each product, before its result goes to memory; batch norms are folded; masks are made
once for all blocks, and none where a batch has no padding.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.cpu import expect_int8
from asrkit.models.attention import (
    RelativeAttention,
    allowed_keys,
    attended,
    attends_in_blocks,
    lowest,
    relative_positions,
)
from asrkit.models.encoders import halve
from asrkit.models.fastconformer import FastConformer
from asrkit.models.folded import fold_norm
from asrkit.models.int8 import Int8Linear
from asrkit.models.packed import (
    PackedDepthwise,
    PackedLinear,
    is_plain_linear,
    multiplies,
    multiply_by_group,
    pack_by_group,
)
from asrkit.models.weight_cache import WeightCache
from asrkit.runtime import readable
from asrkit.shapes import dims, expect, valid_mask

DTYPES = (torch.float32, torch.bfloat16)
LinearLayers = Literal["as_it_is", "int8"]
LAYERS: dict[str, type[PackedLinear] | type[Int8Linear]] = {
    "as_it_is": PackedLinear,
    "int8": Int8Linear,
}
BLOCK = 16  # oneDNN computes so many outputs at once


class Frames(NamedTuple):
    """What all blocks have to know of a batch."""

    valid: Tensor  # (B, T) bool, False in the padding
    padding: Tensor | None  # (B, T, 1) bool, True in the padding; None where there is none
    hidden: Tensor | None  # (B, 1, 1 or T, T) bool, True where a frame may not look; None: nowhere
    context: tuple[int, int]
    positions: Callable[[], Tensor]  # relative positions (P, D), computed when they are asked for


def packs_conformer(model: nn.Module) -> bool:
    """Whether `pack_conformer` takes the model: a FastConformer in eval mode on a CPU, all of it in
    float32 or in bfloat16 that this CPU's oneDNN multiplies, no layer replaced by a quantizer.
    """
    if not isinstance(model, FastConformer) or model.training:
        return False
    kinds = {(weight.dtype, weight.device.type) for weight in model.parameters()}
    if len(kinds) != 1:
        return False
    dtype, device = kinds.pop()
    takes = device == "cpu" and dtype in DTYPES and multiplies(dtype)
    return takes and not _is_replaced(model)


def _is_replaced(encoder: FastConformer) -> bool:
    """Whether a linear layer or its weight is not torch's own any more."""
    layers: list[Any] = [encoder.subsampling.out]
    for block in encoder.blocks:
        parts: Any = block
        attention = parts.attention
        layers += [attention.qkv, attention.position, attention.out, parts.gate, parts.pointwise]
        for _, wide, _, _, narrow in parts.feed:
            layers += [wide, narrow]
    return not all(is_plain_linear(layer) for layer in layers)


def pack_conformer(
    encoder: FastConformer, *, linear_layers: LinearLayers = "as_it_is"
) -> "PackedFastConformer":
    """A FastConformer for inference on a CPU with the weights of `encoder`.

    Each part of `encoder` is given up as soon as it is packed, so both are not in memory at once.

    Args:
        encoder: The eager encoder, in eval mode, perhaps with folded batch norms. It cannot be used
            afterwards.
        linear_layers: "int8" computes those of the blocks in int8 (`asrkit.models.int8`), and all
            else in the dtype of `encoder`: the subsampling, positions, attention itself, depthwise
            convolutions and norms.

    Raises:
        ValueError: `packs_conformer` is False for it; int8 on a CPU without instructions for it.
    """
    wanted = "a FastConformer in eval mode on a CPU, in a dtype that its oneDNN multiplies"
    expect(packs_conformer(encoder), "encoder", wanted, type(encoder).__name__)
    if linear_layers == "int8":
        expect_int8()
    return PackedFastConformer(encoder, linear_layers)


class PackedFastConformer(nn.Module):
    """Computes what `FastConformer` computes in eval mode; without gradients and state_dict.

    Made by `pack_conformer`.
    """

    def __init__(self, encoder: FastConformer, linear_layers: LinearLayers = "as_it_is") -> None:
        super().__init__()
        self.config = encoder.config
        self.width = encoder.width
        self.dtype = next(encoder.parameters()).dtype
        self.subsampling = _Subsampling(encoder.subsampling)
        encoder.subsampling = cast(Any, None)
        self.blocks = nn.ModuleList()
        for number, block in enumerate(encoder.blocks):
            self.blocks.append(_Block(block, LAYERS[linear_layers]))
            encoder.blocks[number] = nn.Identity()
        self.eval()

    @torch.no_grad()
    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,), as `FastConformer.forward`.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64.
        """
        B, T, _ = dims(features, "B T F", "features", F=self.config.bins)
        dims(lengths, "B", "lengths", B=B)
        shape = tuple(features.shape)
        expect(B > 0 and T > 0, "features", "an utterance and a frame at least", shape)
        remedy = "Load it again to train it."
        wanted = "eval mode: its steps are fused"
        expect(not self.training, "model", wanted, "training mode", remedy)
        padding = _padding(lengths, T)
        if padding is not None:
            features = features.masked_fill(padding, 0.0)
        x, lengths = self.subsampling(features.to(self.dtype), lengths)
        if self.config.scale_input:
            x = x * math.sqrt(self.width)
        frames = self._frames(lengths, x)
        for block in self.blocks:
            x = block(x, frames)
        if frames.padding is not None:
            x = x.masked_fill(frames.padding, 0.0)
        return x, lengths

    def _frames(self, lengths: Tensor, x: Tensor) -> Frames:
        """What the blocks have to know of x (B, T, D) with `lengths` (B,)."""
        T = x.shape[1]
        context = self.config.context
        valid = valid_mask(lengths, T)
        first, last = attended(T, context)

        def positions() -> Tensor:
            return relative_positions(first, last, self.width, x)

        padding = _padding(lengths, T)
        hidden = None
        if padding is not None or context != (-1, -1):
            hidden = ~allowed_keys(valid, context)
        return Frames(valid, padding, hidden, context, positions)


def _padding(lengths: Tensor, T: int) -> Tensor | None:
    """(B, T, 1) bool, True in the padding; None where all lengths are known to be T."""
    if readable(lengths) and bool((lengths >= T).all()):
        return None
    return ~valid_mask(lengths, T)[..., None]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer that has `weight` (out, in) and `bias` (out,)."""
    out_features, in_features = weight.shape
    made = nn.Linear(in_features, out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


class _Subsampling(nn.Module):
    """The strided convolutions; channels lie last, as in the eager ones."""

    def __init__(self, eager: Any) -> None:
        super().__init__()
        first, *pairs = eager.convs
        C = len(first.weight)
        self.first = PackedDepthwise(first, "relu")
        self.depthwise = nn.ModuleList(PackedDepthwise(depthwise) for depthwise, _ in pairs)
        self.pointwise = nn.ModuleList()
        for _, pointwise in pairs:
            mix = _linear(pointwise.weight.flatten(1), pointwise.bias)
            self.pointwise.append(PackedLinear(mix, "relu"))
        # Columns by bin, then by channel: in the order in which they lie in memory.
        by_channel = eager.out.weight.detach().unflatten(1, (C, -1))  # (D, C, F')
        by_bin = by_channel.transpose(1, 2).flatten(1)
        self.out = PackedLinear(_linear(by_bin, eager.out.bias))

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T', D) of features (B, T, F), and their lengths.

        In the padding frames are what the last layer makes of zeros: its bias.

        One utterance after the other: what the first convolutions return is the largest tensor of
        the encoder. That of one utterance stays in caches, and in memory that is used again.
        """
        images = features.unsqueeze(-1)  # (B, T, F, 1)
        B = len(images)
        done = [self._one(images[b : b + 1], lengths[b : b + 1]) for b in range(B)]
        frames, halved = zip(*done, strict=True)
        return torch.cat(frames), torch.cat(halved)

    def _one(self, image: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for one utterance (1, T, F, 1)."""
        x, lengths = _halved(self.first(image), lengths)  # (1, T', F', C)
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = pointwise(depthwise(x))
            x, lengths = _halved(x, lengths)
        return self.out(x.flatten(2)), lengths


def _halved(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, T, F, C) with zeros behind the halved lengths (B,), and these."""
    lengths = halve(lengths)
    padding = _padding(lengths, x.shape[1])
    if padding is not None:
        x = x.masked_fill_(padding[..., None], 0.0)
    return x, lengths


class _Block(nn.Module):
    """`ConformerBlock`; each residual is added by the product before it.

    Weights of norms are float32: of bfloat16 frames torch then computes the same 1.4 times as fast.

    Args:
        block: What is packed.
        layer: A class of LAYERS, for all linear layers but that of the positions.
    """

    def __init__(self, block: Any, layer: Any) -> None:
        super().__init__()
        first, second = block.feed
        self.first_feed = _Feed(first, layer)
        self.attention_norm = block.attention_norm.float()
        self.attention = _Attention(block.attention, layer)
        self.conv_norm = block.conv_norm.float()
        self.gate = layer(block.gate)
        weight, bias = fold_norm(block.depthwise, block.batch_norm)
        dtype = block.depthwise.weight.dtype
        D, _, K = weight.shape
        depthwise = nn.Conv1d(D, D, K, groups=D, padding=K // 2, device="meta")
        depthwise.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        depthwise.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        self.depthwise = PackedDepthwise(depthwise, "swish")
        self.pointwise = layer(block.pointwise)
        self.second_feed = _Feed(second, layer)
        self.final_norm = block.final_norm.float()

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


class _Feed(nn.Module):
    """Half a feed-forward layer with its residual; the half is a factor of its last weights."""

    def __init__(self, feed: Any, layer: Any) -> None:
        super().__init__()
        norm, wide, _, _, narrow = feed
        self.norm = norm.float()
        self.wide = layer(wide, "swish")
        bias = narrow.bias
        if bias is not None:
            bias = 0.5 * bias
        self.narrow = layer(_linear(0.5 * narrow.weight, bias))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D)."""
        return self.narrow.plus(self.wide(self.norm(x)), x)


class _Attention(RelativeAttention):
    """`RelativeAttention` that adds its result to a residual.

    The bias of content is part of the bias of the product that makes the queries; `bias_difference`
    is what the bias of positions is above it.
    """

    bias_difference: Tensor

    def __init__(self, eager: Any, layer: Any) -> None:
        nn.Module.__init__(self)
        self.heads = eager.heads
        self.dropout = 0.0
        D = eager.out.out_features
        bias = eager.qkv.bias
        if bias is None:
            bias = eager.qkv.weight.new_zeros(3 * D)
        content = eager.content_bias.detach().flatten()
        shifted = torch.cat([bias.detach()[:D] + content, bias.detach()[D:]])
        self.qkv = layer(_linear(eager.qkv.weight, shifted))
        difference = eager.position_bias.detach() - eager.content_bias.detach()
        self.register_buffer("bias_difference", difference[:, 0], persistent=False)  # (H, D/H)
        self.position = cast(Any, PackedLinear(eager.position))
        self.position_cache = WeightCache()
        self.out = layer(eager.out)

    def forward(self, x: Tensor, residual: Tensor, frames: Frames) -> Tensor:  # type: ignore[override]
        """`residual` (B, T, D) plus the attended frames of x (B, T, D)."""
        B, T, _ = x.shape
        H = self.heads
        qkv = self.qkv(x).view(B, T, 3, H, -1)
        q, k, v = qkv.unbind(2)  # each (B, T, H, D/H), the bias of content in q
        first, last = attended(T, frames.context)
        p = self._positions(frames, (first, last))
        queries = (q + self.bias_difference).view(B * T, -1)
        scores = multiply_by_group(queries, p, H).view(B, T, H, -1)  # by distance
        if attends_in_blocks(T, frames.context):
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # each (B, H, T, D/H)
            scores = scores[..., : first - last + 1].transpose(1, 2).contiguous()
            mixed = self._in_blocks(q, k, v, scores, frames.valid, frames.context)
        else:
            mixed = _attend(qkv, _by_key(scores), frames.hidden)
        out: Any = self.out
        return out.plus(mixed, residual)

    def _positions(self, frames: Frames, distances: tuple[int, int]) -> Tensor:
        """Projected positions over sqrt(D/H), packed for `multiply_by_group`.

        They are filled up with zeros to whole blocks of outputs.
        """

        def project() -> Tensor:
            p = self.position(frames.positions())  # (P, D)
            P = len(p)
            p = p.unflatten(1, (self.heads, -1)).transpose(0, 1)  # (H, P, D/H)
            scaled = p / math.sqrt(p.shape[-1])
            return pack_by_group(F.pad(scaled, (0, 0, 0, -P % BLOCK)))

        cache = cast(WeightCache, self.position_cache)
        return cache.value(self.position.weight, distances, project)


def _by_key(scores: Tensor) -> Tensor:
    """Scores by key (B, H, T, T), of those by distance (B, T, H, 2T or more).

    Row t begins T - t columns into its distances, T ... 1 - T: a view, nothing is copied.
    """
    B, T, H, _ = scores.shape
    of_utterance, of_row, of_head, of_column = scores.stride()
    strides = (of_utterance, of_head, of_row - of_column, of_column)
    return scores.as_strided((B, H, T, T), strides, scores.storage_offset() + T * of_column)


def _attend(qkv: Tensor, bias: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention (B, T, D) of queries, keys and values (B, T, 3, H, D/H).

    `bias` (B, H, T, T) is added to the scores. One utterance after the other, whose scores stay in
    caches; each by head in memory, which costs a copy and makes the products faster, and as three
    steps: for some hundred frames torch's fused attention takes longer on a CPU, 1.4 times in
    bfloat16 for 125 frames and 2 times for 400. The softmax is computed in float32: in bfloat16
    torch takes longer for it.
    """
    B, T, _, H, width = qkv.shape
    scale = 1 / math.sqrt(width)
    mixed = qkv.new_empty(B, T, H, width)
    for b in range(B):
        q, k, v = qkv[b].permute(1, 2, 0, 3).contiguous()  # each (H, T, D/H)
        scores = torch.baddbmm(bias[b], q, k.transpose(1, 2), alpha=scale)
        if hidden is not None:
            scores = scores.masked_fill_(hidden[b], lowest(scores.dtype))
        shares = scores.float().softmax(-1).to(v.dtype)
        torch.bmm(shares, v, out=mixed[b].transpose(0, 1))
    return mixed.flatten(2)
