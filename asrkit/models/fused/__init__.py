"""A FastConformer for inference on a GPU: between its products few passes over memory, each one
kernel.

`fuse` makes it of an eager one. The steps are operators of their own, `torch.ops.asrkit`: on CUDA
the kernels of asrkit.models.fused.triton, which have not met a GPU yet, on a CPU those of
asrkit.models.fused.reference, to be held to.
"""

import math
from copy import copy
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.models.encoders import halve
from asrkit.models.fastconformer import (
    ConformerBlock,
    FastConformer,
    RelativeAttention,
    _blocked,
    attended,
    relative_positions,
)
from asrkit.models.folded import folded
from asrkit.models.fused import float8, reference
from asrkit.models.kept import Kept
from asrkit.runtime import lacks
from asrkit.shapes import dims, expect, valid_mask

# T' is rounded up to a multiple: rows of scores then begin at 32 bytes, and batches have fewer
# shapes
ALIGNED = 16
FeedForward = Literal["as_it_is", "float8"]


def _operator(function: Any, kernel: Any = None) -> Any:
    """`function` as torch.ops.asrkit's operator on a CPU; on CUDA `kernel`, by default the Triton
    one of that name.
    """
    made = torch.library.custom_op(
        f"asrkit::{function.__name__}", function, mutates_args=(), device_types="cpu"
    )

    made.register_kernel("cuda", kernel or partial(_launch, function.__name__))
    made.register_fake(function)
    return made


def _launch(name: str, *given: Any) -> Any:
    """The Triton kernel of that name, on the device of its first tensor: Triton itself launches on
    the current one.
    """
    from asrkit.models.fused import triton as kernels

    with torch.cuda.device_of(given[0]):
        return getattr(kernels, name)(*given)


add_norm, add_norm_twice, gated_conv, position_bias, first_convs, masked_conv = (
    _operator(function)
    for function in (
        reference.add_norm,
        reference.add_norm_twice,
        reference.gated_conv,
        reference.position_bias,
        reference.first_convs,
        reference.masked_conv,
    )
)
quantize, silu_quantize = _operator(float8.quantize), _operator(float8.silu_quantize)
scaled_product = _operator(float8.scaled_product, float8.scaled_product_on_cuda)


def fuse(encoder: FastConformer, *, feed_forward: FeedForward = "as_it_is") -> "FusedFastConformer":
    """`encoder` with fused steps between its products, whose weights it shares; ValueError where
    that cannot be.

    feed_forward: "float8" for products of 8-bit floats (asrkit.models.fused.float8), on CUDA for
    sm_89 and later. What the fused steps use is worked out now: batch norms are folded, the biases
    of attention become one of its products. So change no weight afterwards but those of linear
    layers, and these not through `.data`; fuse again instead. The eager encoder stays as it is, and
    follows every change.
    """
    expect(isinstance(encoder, FastConformer), "encoder", "a FastConformer", type(encoder).__name__)
    expect(
        not encoder.training,
        "encoder",
        "eval mode",
        "training mode",
        "Call .eval() first: kernels have no gradient.",
    )
    known = get_args(FeedForward)
    expect(
        feed_forward in known,
        "feed_forward",
        "one of " + ", ".join(map(repr, known)),
        repr(feed_forward),
    )
    weight = encoder.subsampling.out.weight
    if weight.is_cuda:
        if feed_forward == "float8" and torch.cuda.is_available():
            has = torch.cuda.get_device_capability(weight.device)
            expect(
                has >= (8, 9),
                "feed_forward",
                "'as_it_is' before sm_89",
                repr(feed_forward),
                "It has no such products.",
            )
        able = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        expect(able, "encoder", "float32, bfloat16 or float16 on CUDA", weight.dtype)
        why = lacks("triton")
        expect(
            not why, "encoder", "a triton that works, on a CUDA device", why, "pip install triton."
        )
    return FusedFastConformer(encoder, feed_forward)


class FusedFastConformer(nn.Module):
    """What `FastConformer` computes in eval mode, with neither gradients nor a state_dict to keep.
    See `fuse`.
    """

    def __init__(self, encoder: FastConformer, feed_forward: FeedForward) -> None:
        super().__init__()
        self.config, self.width = encoder.config, encoder.width
        front = _Subsampling if encoder.config.subsampling > 2 else _PlainSubsampling
        self.subsampling = front(encoder.subsampling)
        blocks: Any = encoder.blocks
        self.blocks = nn.ModuleList(_Block(block, feed_forward) for block in blocks)
        self.eval()

    @torch.no_grad()
    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, T', D) and their lengths (B,), as `FastConformer.forward`; inside, T'
        is a multiple of ALIGNED.
        """
        B, T, _ = dims(features, "B T F", "features", F=self.config.bins)
        dims(lengths, "B", "lengths", B=B)
        expect(
            B > 0 and T > 0, "features", "an utterance and a frame at least", tuple(features.shape)
        )
        expect(
            not self.training,
            "encoder",
            "eval mode",
            "training mode",
            "Train the FastConformer that it was made of.",
        )
        wanted = -(-T // self.config.subsampling)  # T'
        x, lengths = self.subsampling(features, lengths, -(-wanted // ALIGNED) * ALIGNED)
        x = x * math.sqrt(self.width) if self.config.scale_input else x
        x = self._through(x, lengths)[:, :wanted] if self.blocks else x[:, :wanted]
        return x.masked_fill(~valid_mask(lengths, wanted)[..., None], 0.0), lengths

    def _through(self, x: Tensor, lengths: Tensor) -> Tensor:
        """`x` (B, T', D) behind all blocks; each hands the next what its first norm makes of it."""
        context = self.config.context
        positions = relative_positions(*attended(x.shape[1], context), self.width, x)
        blocks: Any = [*self.blocks]
        y = blocks[0].norms[0](x)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            x, y = block(x, y, lengths, positions, context, following)
        return y


class _Subsampling(nn.Module):
    """The strided convolutions; channels lie last, as in the eager ones."""

    out_weight: Tensor
    out_bias: Tensor

    def __init__(self, plain: Any) -> None:
        super().__init__()
        first, *pairs = plain.convs
        C = len(first.weight)
        rows = torch.cat([first.weight.detach().flatten(1).T, first.bias.detach()[None]])  # (10, C)
        self.register_buffer(
            "first", F.pad(rows, (0, 0, 0, 6))
        )  # (16, C): what a tensor core multiplies at least
        self.pointwise = nn.ModuleList(pair[1] for pair in pairs)
        for number, (depthwise, _) in enumerate(pairs):
            self.register_buffer(
                f"weight_{number}", _wide(depthwise.weight).flatten(1).T.contiguous()
            )  # (9, C)
            self.register_buffer(f"bias_{number}", _wide(depthwise.bias))
        weight = (
            plain.out.weight.detach().unflatten(1, (C, -1)).transpose(1, 2)
        )  # columns by bin, then channel: as they lie
        self.register_buffer("out_weight", weight.flatten(1))
        self.register_buffer("out_bias", plain.out.bias.detach())

    def forward(self, features: Tensor, lengths: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """(B, frames, D) and the encoded lengths. Behind `frames` lies nothing but padding."""
        lengths = lengths.clamp(max=features.shape[1])
        frames <<= len(self.pointwise) - 1
        x = first_convs(
            features, lengths, frames, self.first, self.weight_0, self.bias_0
        )  # (B, frames, F', C)
        lengths = halve(halve(lengths))
        x = self._mix(x, 0)
        for number in range(1, len(self.pointwise)):
            frames >>= 1
            weight, bias = getattr(self, f"weight_{number}"), getattr(self, f"bias_{number}")
            x = self._mix(masked_conv(x, lengths, frames, weight, bias), number)
            lengths = halve(lengths)
        return F.linear(x.relu_().flatten(2), self.out_weight, self.out_bias), lengths

    def _mix(self, x: Tensor, number: int) -> Tensor:
        pointwise: Any = self.pointwise[number]
        return F.linear(x, pointwise.weight.flatten(1), pointwise.bias)


class _PlainSubsampling(nn.Module):
    """The eager convolutions, of features that are padded: one convolution has nothing to be fused
    with.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, features: Tensor, lengths: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """(B, frames, D) and the encoded lengths."""
        T = features.shape[1]
        features = F.pad(features, (0, 0, 0, 2 * frames - T)).masked_fill(
            ~valid_mask(lengths, 2 * frames)[..., None], 0.0
        )
        return self.plain(features.to(self.plain.out.weight.dtype), lengths)


class _Attention(nn.Module):
    """`RelativeAttention`: both its biases are added where a pass over memory is made anyway.

    With u the bias of content and w that of positions, (q + u) k + (q + w) p = (q + u) (k + p) + (w
    - u) p. The first u is part of the bias of the product that makes q; the last term is the same
    for all frames of a head.
    """

    qkv_bias: Tensor
    between: Tensor

    def __init__(self, plain: RelativeAttention) -> None:
        super().__init__()
        D = plain.out.out_features
        self.plain, self._kept = copy(plain), Kept()  # it shares the weights
        self.plain.kept = Kept()  # which the eager one goes without
        bias = (
            plain.qkv.weight.new_zeros(3 * D)
            if plain.qkv.bias is None
            else plain.qkv.bias.detach().clone()
        )
        bias[:D] += plain.content_bias.detach().flatten()
        self.register_buffer("qkv_bias", bias)
        self.register_buffer(
            "between", _wide(plain.position_bias) - _wide(plain.content_bias)
        )  # (H, 1, D/H)

    def forward(
        self, x: Tensor, lengths: Tensor, positions: Tensor, context: tuple[int, int]
    ) -> Tensor:
        """(B, T, D), as RelativeAttention.forward."""
        B, T, _ = x.shape
        if _blocked(T, context):
            return self.plain(x, valid_mask(lengths, T), positions, context)
        q, k, v = (
            F.linear(x, self.plain.qkv.weight, self.qkv_bias)
            .view(B, T, 3, self.plain.heads, -1)
            .unbind(2)
        )
        p = self.plain.projected(positions, (T, 1 - T))  # (H, D/H, 2T)
        scores = (q.flatten(0, 1).transpose(0, 1) @ p).view(
            -1, B, T, 2 * T
        )  # (H, B, T, 2T), by distance
        shifted = scores.flatten(-2)[..., T:].view(-1, B, T, 2 * T - 1)[
            ..., :T
        ]  # by key: see RelativeAttention
        left, right = (T if side < 0 else side for side in context)
        bias = position_bias(shifted, self._constant(p), lengths, left, right)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.plain.out(
            F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
        )

    def _constant(self, p: Tensor) -> Tensor:
        """(H, 2T) in float32 at least."""
        question = p.shape, p.dtype, p.device
        return self._kept.value(
            self.plain.position.weight,
            question,
            lambda: (self.between @ p.to(self.between.dtype))[:, 0],
        )


class _Block(nn.Module):
    """`ConformerBlock`; each residual is added by the kernel that takes the next norm."""

    def __init__(self, block: ConformerBlock, feed_forward: FeedForward) -> None:
        super().__init__()
        made = _Float8Feed if feed_forward == "float8" else _Feed
        first, second = block.feed
        assert isinstance(first, nn.Sequential) and isinstance(second, nn.Sequential)
        self.norms = nn.ModuleList(
            [first[0], block.attention_norm, block.conv_norm, second[0], block.final_norm]
        )
        self.feeds = nn.ModuleList(made(feed[1], feed[4]) for feed in (first, second))
        self.attention = _Attention(block.attention)
        self.gate, self.pointwise = block.gate, block.pointwise
        weight, bias = folded(block.depthwise, block.batch_norm)
        self.register_buffer("weight", weight[:, 0].T.contiguous())  # (K, D)
        self.register_buffer("bias", bias)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        lengths: Tensor,
        positions: Tensor,
        context: tuple[int, int],
        following: "_Block | None",
    ) -> tuple[Tensor, Tensor]:
        """What this block makes of x (B, T, D) and its first norm y, and the first norm of the
        block that follows, if one does.
        """
        _, attention, conv, feed, final = self.norms
        x, y = add_norm(x, self.feeds[0](y), 0.5, *_numbers(attention))
        x, y = add_norm(x, self.attention(y, lengths, positions, context), 1.0, *_numbers(conv))
        y = gated_conv(self.gate(y), lengths, self.weight, self.bias)
        x, y = add_norm(x, self.pointwise(y), 1.0, *_numbers(feed))
        y = self.feeds[1](y)
        if following is None:
            return add_norm(x, y, 0.5, *_numbers(final))
        return add_norm_twice(x, y, 0.5, *_numbers(final), *_numbers(following.norms[0]))


class _Feed(nn.Module):
    """The two products of a feed-forward, and its SiLU in place."""

    def __init__(self, wide: nn.Module, narrow: nn.Module) -> None:
        super().__init__()
        self.wide, self.narrow = wide, narrow

    def forward(self, y: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D)."""
        return self.narrow(F.silu(self.wide(y), inplace=True))


class _Float8Feed(nn.Module):
    """The same in 8-bit floats; SiLU and the scales of what it gives are one pass."""

    def __init__(self, wide: nn.Module, narrow: nn.Module) -> None:
        super().__init__()
        self.wide, self.narrow = float8.Float8Linear(wide), float8.Float8Linear(narrow)

    def forward(self, y: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D)."""
        for layer, quantized in ((self.wide, quantize), (self.narrow, silu_quantize)):
            y = scaled_product(*quantized(y), layer.weight, layer.scale, layer.bias)
        return y


def _numbers(norm: Any) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


def _wide(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
