"""A FastConformer for inference on a GPU, in which the steps between two products are one kernel.

`fuse` makes it of an eager FastConformer. The fused steps are operators of their own,
`torch.ops.asrkit`: on CUDA they run the kernels of `asrkit.models.fused.triton`, which have not met
a GPU yet; on a CPU those of `asrkit.models.fused.reference`, which the kernels are tested against.
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
        f"asrkit::{name}", function, mutates_args=(), device_types="cpu"
    )
    operator.register_kernel("cuda", kernel or partial(_launch, name))
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
    expect(isinstance(encoder, FastConformer), "encoder", "a FastConformer", type(encoder).__name__)
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
        able = torch.cuda.get_device_capability(weight.device) >= (8, 9)
        wanted = "'as_it_is' before sm_89"
        expect(able, "feed_forward", wanted, repr(feed_forward), "It has no such products.")
    able = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    expect(able, "encoder", "float32, bfloat16 or float16 on CUDA", weight.dtype)
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
        x = x[:, :frames]
        return x.masked_fill(~valid_mask(lengths, frames)[..., None], 0.0), lengths

    def _through_blocks(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Frames (B, T', D) behind all blocks; each block applies the first norm of the next."""
        context = self.config.context
        positions = relative_positions(*attended(x.shape[1], context), self.width, x)
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
        rows = torch.cat([first.weight.detach().flatten(1).T, first.bias.detach()[None]])  # (10, C)
        # A tensor core multiplies 16 rows at least.
        self.register_buffer("first", F.pad(rows, (0, 0, 0, 6)))  # (16, C)
        self.pointwise = nn.ModuleList(pair[1] for pair in pairs)
        for number, (depthwise, _) in enumerate(pairs):
            weight = _at_least_float32(depthwise.weight).flatten(1).T.contiguous()  # (9, C)
            self.register_buffer(f"weight_{number}", weight)
            self.register_buffer(f"bias_{number}", _at_least_float32(depthwise.bias))
        # Columns by bin, then by channel: in the order in which they lie in memory.
        weight = eager.out.weight.detach().unflatten(1, (C, -1)).transpose(1, 2)
        self.register_buffer("out_weight", weight.flatten(1))
        self.register_buffer("out_bias", eager.out.bias.detach())

    def forward(self, features: Tensor, lengths: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """(B, frames, D) and the encoded lengths; behind `frames` lies nothing but padding."""
        lengths = lengths.clamp(max=features.shape[1])
        frames <<= len(self.pointwise) - 1
        # (B, frames, F', C)
        x = first_convs(features, lengths, frames, self.first, self.weight_0, self.bias_0)
        lengths = halve(halve(lengths))
        x = self._mix(x, 0)
        for number in range(1, len(self.pointwise)):
            frames >>= 1
            weight = getattr(self, f"weight_{number}")
            bias = getattr(self, f"bias_{number}")
            x = self._mix(masked_conv(x, lengths, frames, weight, bias), number)
            lengths = halve(lengths)
        return F.linear(x.relu_().flatten(2), self.out_weight, self.out_bias), lengths

    def _mix(self, x: Tensor, number: int) -> Tensor:
        pointwise: Any = self.pointwise[number]
        return F.linear(x, pointwise.weight.flatten(1), pointwise.bias)


class _EagerSubsampling(nn.Module):
    """The eager convolution on padded features: a single one has nothing to be fused with."""

    def __init__(self, eager: Any) -> None:
        super().__init__()
        self.eager = eager

    def forward(self, features: Tensor, lengths: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """(B, frames, D) and the encoded lengths."""
        features = F.pad(features, (0, 0, 0, 2 * frames - features.shape[1]))
        padding = ~valid_mask(lengths, 2 * frames)
        features = features.masked_fill(padding[..., None], 0.0)
        return self.eager(features.to(self.eager.out.weight.dtype), lengths)


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
        self.eager = copy(eager)  # it shares the weights, and has `kept` of its own
        self.eager.kept = Kept()
        self._kept = Kept()
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
        self, x: Tensor, lengths: Tensor, positions: Tensor, context: tuple[int, int]
    ) -> Tensor:
        """Attended frames (B, T, D), as `RelativeAttention.forward`."""
        B, T, _ = x.shape
        if _blocked(T, context):
            return self.eager(x, valid_mask(lengths, T), positions, context)
        qkv = F.linear(x, self.eager.qkv.weight, self.qkv_bias)
        q, k, v = qkv.view(B, T, 3, self.eager.heads, -1).unbind(2)
        p = self.eager.projected(positions, (T, 1 - T))  # (H, D/H, 2T)
        scores = (q.flatten(0, 1).transpose(0, 1) @ p).view(-1, B, T, 2 * T)  # by distance
        # By key: see RelativeAttention._everywhere.
        shifted = scores.flatten(-2)[..., T:].view(-1, B, T, 2 * T - 1)[..., :T]
        left, right = (T if side < 0 else side for side in context)
        bias = position_bias(shifted, self._constant_scores(p), lengths, left, right)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, bias)
        return self.eager.out(out.transpose(1, 2).flatten(2))

    def _constant_scores(self, p: Tensor) -> Tensor:
        """(w - u) p, the same for all frames: (H, 2T), in float32 at least."""

        def multiply() -> Tensor:
            return (self.bias_difference @ p.to(self.bias_difference.dtype))[:, 0]

        key = (p.shape, p.dtype, p.device)
        return self._kept.value(self.eager.position.weight, key, multiply)


class _Block(nn.Module):
    """`ConformerBlock`; each residual is added by the kernel that computes the next norm."""

    def __init__(self, block: ConformerBlock, feed_forward: FeedForward) -> None:
        super().__init__()
        feed_class = _Float8Feed if feed_forward == "float8" else _Feed
        first, second = block.feed
        assert isinstance(first, nn.Sequential) and isinstance(second, nn.Sequential)
        self.norms = nn.ModuleList(
            [first[0], block.attention_norm, block.conv_norm, second[0], block.final_norm]
        )
        self.feeds = nn.ModuleList(feed_class(feed[1], feed[4]) for feed in (first, second))
        self.attention = _Attention(block.attention)
        self.gate = block.gate
        self.pointwise = block.pointwise
        weight, bias = folded(block.depthwise, block.batch_norm)
        self.register_buffer("weight", weight[:, 0].T.contiguous())  # (K, D)
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
        x, y = add_norm(x, self.feeds[0](normed), 0.5, *_parameters(attention_norm))
        attended_frames = self.attention(y, lengths, positions, context)
        x, y = add_norm(x, attended_frames, 1.0, *_parameters(conv_norm))
        y = gated_conv(self.gate(y), lengths, self.weight, self.bias)
        x, y = add_norm(x, self.pointwise(y), 1.0, *_parameters(feed_norm))
        y = self.feeds[1](y)
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
        return self.narrow(F.silu(self.wide(y), inplace=True))


class _Float8Feed(nn.Module):
    """The same in 8-bit floats; SiLU and the scales of its output are one pass over memory."""

    def __init__(self, wide: nn.Module, narrow: nn.Module) -> None:
        super().__init__()
        self.wide = float8.Float8Linear(wide)
        self.narrow = float8.Float8Linear(narrow)

    def forward(self, y: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D)."""
        for layer, quantized in ((self.wide, quantize), (self.narrow, silu_quantize)):
            y = scaled_product(*quantized(y), layer.weight, layer.scale, layer.bias)
        return y


def _parameters(norm: Any) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
