"""A FastConformer for inference on a GPU, in which the steps between two products are one kernel.

`fuse` makes it of an eager FastConformer. The fused steps are operators of their own,
`torch.ops.asrkit`. On CUDA they run the kernels of `asrkit.models.fused.triton`, which have not run
on a GPU yet; on a CPU the functions of `asrkit.models.fused.reference`, which the kernels are
tested against.
"""

import math
from copy import copy
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.models.attention import (
    RelativeAttention,
    attended,
    attends_in_blocks,
    by_key,
    relative_positions,
)
from asrkit.models.encoders import halve
from asrkit.models.fastconformer import ConformerBlock, FastConformer
from asrkit.models.folded import fold_norm
from asrkit.models.fused import float8, reference
from asrkit.models.weight_cache import WeightCache
from asrkit.runtime import lacks
from asrkit.shapes import dims, expect, valid_mask

# T' is rounded up to a multiple of this: rows of scores then begin at 32 bytes, and batches have
# fewer different shapes.
ALIGNED = 16
FeedForward = Literal["as_it_is", "float8"]


def _operator(function: Any, kernel: Any = None) -> Any:
    """Register `function` as an operator torch.ops.asrkit.NAME for the CPU, and return it.

    On CUDA the operator runs `kernel`, by default the Triton kernel of the same name.
    """
    name = function.__name__
    operator = torch.library.custom_op(
        f"asrkit::{name}",
        function,
        mutates_args=(),
        device_types="cpu",
    )
    if kernel is None:
        kernel = partial(_launch, name)
    operator.register_kernel("cuda", kernel)
    operator.register_fake(function)
    return operator


def _launch(name: str, *args: Any) -> Any:
    """Run the Triton kernel `name` on the device of its first tensor.

    Triton launches on the current device, whatever device the tensors are on.
    """
    from asrkit.models.fused import triton as kernels

    with torch.cuda.device_of(args[0]):
        return getattr(kernels, name)(*args)


add_norm = _operator(reference.add_norm)
add_norm_twice = _operator(reference.add_norm_twice)
gated_conv = _operator(reference.gated_conv)
position_bias = _operator(reference.position_bias)
first_convs = _operator(reference.first_convs)
masked_conv = _operator(reference.masked_conv)
quantize = _operator(float8.quantize)
silu_quantize = _operator(float8.silu_quantize)
scaled_product = _operator(float8.scaled_product, float8.scaled_product_on_cuda)


def fuse(encoder: FastConformer, *, feed_forward: FeedForward = "as_it_is") -> "FusedFastConformer":
    """A FastConformer with the weights of `encoder` and fused steps between its products.

    Batch norms are folded and the biases of attention prepared now. So change no weight afterwards
    but those of linear layers, and these not through `.data`; fuse again instead. The eager encoder
    stays as it is.

    Args:
        encoder: The eager encoder, in eval mode.
        feed_forward: "as_it_is", or "float8" for feed-forward products in 8-bit floats
            (`asrkit.models.fused.float8`), on CUDA for sm_89 and later.

    Raises:
        ValueError: `encoder` is none, is in training mode, or cannot be fused on its device.
    """
    fits = isinstance(encoder, FastConformer)
    expect(fits, "encoder", "a FastConformer", type(encoder).__name__)
    remedy = "Call .eval() first: kernels have no gradient."
    expect(not encoder.training, "encoder", "eval mode", "training mode", remedy)
    known = get_args(FeedForward)
    wanted = "one of " + ", ".join(map(repr, known))
    expect(feed_forward in known, "feed_forward", wanted, repr(feed_forward))
    weight = encoder.subsampling.out.weight
    if weight.is_cuda:
        _expect_fuses_on_cuda(weight, feed_forward)
    return FusedFastConformer(encoder, feed_forward)


def _expect_fuses_on_cuda(weight: Tensor, feed_forward: FeedForward) -> None:
    if feed_forward == "float8" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(weight.device)
        wanted = "'as_it_is' before sm_89"
        remedy = "It has no such products."
        expect(capability >= (8, 9), "feed_forward", wanted, repr(feed_forward), remedy)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    supported = weight.dtype in dtypes
    expect(supported, "encoder", "float32, bfloat16 or float16 on CUDA", weight.dtype)
    reason = lacks("triton")
    wanted = "a triton that works, on a CUDA device"
    expect(not reason, "encoder", wanted, reason, "pip install triton.")


class FusedFastConformer(nn.Module):
    """Computes what `FastConformer` computes in eval mode; without gradients and state_dict.

    Made by `fuse`.
    """

    def __init__(self, encoder: FastConformer, feed_forward: FeedForward) -> None:
        super().__init__()
        self.config = encoder.config
        self.width = encoder.width
        self.subsampling: _Subsampling | _EagerSubsampling
        if encoder.config.subsampling > 2:
            self.subsampling = _Subsampling(encoder.subsampling)
        else:
            self.subsampling = _EagerSubsampling(encoder.subsampling)
        blocks: Any = encoder.blocks
        self.blocks = nn.ModuleList(_Block(block, feed_forward) for block in blocks)
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
        remedy = "Train the FastConformer that it was made of."
        expect(not self.training, "encoder", "eval mode", "training mode", remedy)
        frames = -(-T // self.config.subsampling)  # T'
        aligned = -(-frames // ALIGNED) * ALIGNED
        x, lengths = self.subsampling(features, lengths, aligned)
        if self.config.scale_input:
            x = x * math.sqrt(self.width)
        if self.blocks:
            x = self._through_blocks(x, lengths)
        valid = valid_mask(lengths, frames)
        encoded = x[:, :frames].masked_fill(~valid[..., None], 0.0)
        return encoded, lengths

    def _through_blocks(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Frames (B, T', D) behind all blocks; each block applies the first norm of the next."""
        context = self.config.context
        first, last = attended(x.shape[1], context)
        positions = relative_positions(first, last, self.width, x)
        blocks: Any = list(self.blocks)
        following = [*blocks[1:], None]
        normed = blocks[0].norms[0](x)
        for block, next_block in zip(blocks, following, strict=True):
            x, normed = block(x, normed, lengths, positions, context, next_block)
        return normed


class _Subsampling(nn.Module):
    """The strided convolutions; channels lie last, as in the eager ones."""

    out_weight: Tensor
    out_bias: Tensor

    def __init__(self, eager: Any) -> None:
        super().__init__()
        first, *pairs = eager.convs
        C = len(first.weight)
        weights = first.weight.detach().flatten(1).T  # (9, C)
        bias = first.bias.detach()[None]
        rows = torch.cat([weights, bias])
        # A tensor core multiplies 16 rows at least.
        self.register_buffer("first", F.pad(rows, (0, 0, 0, 6)))  # (16, C)
        self.pointwise = nn.ModuleList(pointwise for _, pointwise in pairs)
        for number, (depthwise, _) in enumerate(pairs):
            weight = _at_least_float32(depthwise.weight).flatten(1)
            bias = _at_least_float32(depthwise.bias)
            self.register_buffer(f"weight_{number}", weight.T.contiguous())  # (9, C)
            self.register_buffer(f"bias_{number}", bias)
        # Columns by bin, then by channel: in the order in which they lie in memory.
        by_channel = eager.out.weight.detach().unflatten(1, (C, -1))  # (D, C, F')
        by_bin = by_channel.transpose(1, 2).flatten(1)
        self.register_buffer("out_weight", by_bin)
        self.register_buffer("out_bias", eager.out.bias.detach())

    def forward(self, features: Tensor, lengths: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """Frames (B, frames, D) and the encoded lengths (B,).

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,); those above T count as T.
            frames: Frames of the result; behind them lies nothing but padding.
        """
        lengths = lengths.clamp(max=features.shape[1])
        frames <<= len(self.pointwise) - 1
        x = first_convs(features, lengths, frames, self.first, self.weight_0, self.bias_0)
        lengths = halve(halve(lengths))
        x = self._mix(x, 0)  # (B, frames, F', C)
        for number in range(1, len(self.pointwise)):
            frames >>= 1
            weight = getattr(self, f"weight_{number}")
            bias = getattr(self, f"bias_{number}")
            x = masked_conv(x, lengths, frames, weight, bias)
            x = self._mix(x, number)
            lengths = halve(lengths)
        rows = x.relu_().flatten(2)  # (B, frames, F' C)
        return F.linear(rows, self.out_weight, self.out_bias), lengths

    def _mix(self, x: Tensor, number: int) -> Tensor:
        """The pointwise convolution `number` of (B, T, F', C), without its ReLU."""
        pointwise: Any = self.pointwise[number]
        weight = pointwise.weight.flatten(1)
        return F.linear(x, weight, pointwise.bias)


class _EagerSubsampling(nn.Module):
    """The eager convolution on padded features: a single one has nothing to be fused with."""

    def __init__(self, eager: Any) -> None:
        super().__init__()
        self.eager = eager

    def forward(self, features: Tensor, lengths: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """Frames (B, frames, D) and the encoded lengths (B,).

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,).
            frames: Frames of the result, T / 2 at least.
        """
        T = 2 * frames
        features = F.pad(features, (0, 0, 0, T - features.shape[1]))
        valid = valid_mask(lengths, T)
        features = features.masked_fill(~valid[..., None], 0.0)
        features = features.to(self.eager.out.weight.dtype)
        return self.eager(features, lengths)


class _Attention(nn.Module):
    """`RelativeAttention` whose biases are added in passes over memory that are made anyway.

    With u the bias of content and w that of positions,
    (q + u) k + (q + w) p = (q + u) (k + p) + (w - u) p. The first u is part of the bias of the
    product that makes q; the last term is the same for all frames of a head.
    """

    qkv_bias: Tensor
    bias_difference: Tensor

    def __init__(self, eager: RelativeAttention) -> None:
        super().__init__()
        D = eager.out.out_features
        self.eager = copy(eager)  # it shares the weights, and has `position_cache` of its own
        self.eager.position_cache = WeightCache()
        self._constant_cache = WeightCache()
        if eager.qkv.bias is None:
            bias = eager.qkv.weight.new_zeros(3 * D)
        else:
            bias = eager.qkv.bias.detach().clone()
        bias[:D] += eager.content_bias.detach().flatten()
        self.register_buffer("qkv_bias", bias)
        u = _at_least_float32(eager.content_bias)
        w = _at_least_float32(eager.position_bias)
        self.register_buffer("bias_difference", w - u)  # (H, 1, D/H)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor,
        positions: Tensor,
        context: tuple[int, int],
    ) -> Tensor:
        """Attended frames (B, T, D), as `RelativeAttention.forward`.

        Args:
            x: Frames (B, T, D).
            lengths: Frames of each utterance (B,).
            positions: `relative_positions` for T frames and `context`.
            context: Frames that a frame attends to on its (left, right); -1 is all.
        """
        B, T, _ = x.shape
        if attends_in_blocks(T, context):
            valid = valid_mask(lengths, T)
            return self.eager(x, valid, positions, context)
        H = self.eager.heads
        qkv = F.linear(x, self.eager.qkv.weight, self.qkv_bias)
        q, k, v = qkv.view(B, T, 3, H, -1).unbind(2)  # each (B, T, H, D/H)
        p = self.eager.projected(positions, attended(T, context))  # (H, D/H, 2T)
        by_head = q.flatten(0, 1).transpose(0, 1)  # (H, B T, D/H), a view
        scores = (by_head @ p).view(H, B, T, 2 * T)  # by distance
        constant = self._constant_scores(p)
        left, right = (T if side < 0 else side for side in context)
        bias = position_bias(by_key(scores), constant, lengths, left, right)
        q = q.transpose(1, 2)  # (B, H, T, D/H)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, bias)
        frames = out.transpose(1, 2).flatten(2)
        return self.eager.out(frames)

    def _constant_scores(self, p: Tensor) -> Tensor:
        """(w - u) p, the same for all frames: (H, 2T), in float32 at least."""

        def multiply() -> Tensor:
            wide = p.to(self.bias_difference.dtype)
            scores = self.bias_difference @ wide  # (H, 1, 2T)
            return scores[:, 0]

        key = (p.shape, p.dtype, p.device)
        return self._constant_cache.value(self.eager.position.weight, key, multiply)


class _Block(nn.Module):
    """`ConformerBlock`; each residual is added by the kernel that computes the next norm."""

    def __init__(self, block: ConformerBlock, feed_forward: FeedForward) -> None:
        super().__init__()
        norms = []
        feeds: list[nn.Module] = []
        for feed in block.feed:
            norm, wide, _, _, narrow = cast(nn.Sequential, feed)
            norms.append(norm)
            if feed_forward == "float8":
                feeds.append(_Float8Feed(wide, narrow))
            else:
                feeds.append(_Feed(wide, narrow))
        self.norms = nn.ModuleList(
            [
                norms[0],
                block.attention_norm,
                block.conv_norm,
                norms[1],
                block.final_norm,
            ]
        )
        self.feeds = nn.ModuleList(feeds)
        self.attention = _Attention(block.attention)
        self.gate = block.gate
        self.pointwise = block.pointwise
        weight, bias = fold_norm(block.depthwise, block.batch_norm)
        by_tap = weight[:, 0].T  # (K, D)
        self.register_buffer("weight", by_tap.contiguous())
        self.register_buffer("bias", bias)

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        lengths: Tensor,
        positions: Tensor,
        context: tuple[int, int],
        next_block: "_Block | None",
    ) -> tuple[Tensor, Tensor]:
        """The frames after this block, and what the next block's first norm makes of them.

        Args:
            x: Frames (B, T, D).
            normed: What this block's first norm makes of them (B, T, D).
            lengths: Frames of each utterance (B,).
            positions: `relative_positions` for T frames and `context`.
            context: Frames that a frame attends to on its (left, right).
            next_block: The block whose first norm is applied; None behind the last.
        """
        _, attention_norm, conv_norm, feed_norm, final_norm = self.norms
        first_feed, second_feed = self.feeds
        y = first_feed(normed)
        x, y = add_norm(x, y, 0.5, *_parameters(attention_norm))
        y = self.attention(y, lengths, positions, context)
        x, y = add_norm(x, y, 1.0, *_parameters(conv_norm))
        y = self.gate(y)
        y = gated_conv(y, lengths, self.weight, self.bias)
        y = self.pointwise(y)
        x, y = add_norm(x, y, 1.0, *_parameters(feed_norm))
        y = second_feed(y)
        if next_block is None:
            return add_norm(x, y, 0.5, *_parameters(final_norm))
        next_norm = _parameters(next_block.norms[0])
        return add_norm_twice(x, y, 0.5, *_parameters(final_norm), *next_norm)


class _Feed(nn.Module):
    """The two products of a feed-forward, with its SiLU in place."""

    def __init__(self, wide: nn.Module, narrow: nn.Module) -> None:
        super().__init__()
        self.wide = wide
        self.narrow = narrow

    def forward(self, y: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D)."""
        y = self.wide(y)
        y = F.silu(y, inplace=True)
        return self.narrow(y)


class _Float8Feed(nn.Module):
    """The same in 8-bit floats; SiLU and the scales of its output are one pass over memory."""

    def __init__(self, wide: nn.Module, narrow: nn.Module) -> None:
        super().__init__()
        self.wide = float8.Float8Linear(wide)
        self.narrow = float8.Float8Linear(narrow)

    def forward(self, y: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D)."""
        wide = self.wide
        narrow = self.narrow
        rows, scales = quantize(y)
        y = scaled_product(rows, scales, wide.weight, wide.scale, wide.bias)
        rows, scales = silu_quantize(y)
        return scaled_product(rows, scales, narrow.weight, narrow.scale, narrow.bias)


def _parameters(norm: Any) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


def _at_least_float32(weight: Tensor) -> Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(dtype)
