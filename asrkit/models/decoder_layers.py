"""The layers of an attention decoder, a Transformer with layer norms first (arXiv 2002.04745), and
what it keeps between steps: keys and values of the encoder's frames and of its own tokens.

All tensors are batch first, as `asrkit.decoders.states` expects.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.models.common import join_heads, split_heads
from asrkit.models.cpu.prepacked import PrepackedLinear

# On a CPU a step of one token for rows of equal length attends to a multiple of this many slots.
# oneDNN keeps code for each size of a product: 150 MiB for all sizes in a recording of eight
# minutes.
SLOTS = 32
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


class Memory(NamedTuple):
    """Keys and values of the encoder's frames in every layer, each tensor contiguous."""

    mask: Tensor  # (B, 1, 1, T), added to scores: 0 for valid frames, -inf for others
    keys: tuple[Tensor, ...]  # L times (B, H, T, D / H)
    values: tuple[Tensor, ...]  # likewise


Kept = tuple[Tensor, ...]  # keys and values of a layer, each (B, H, room, D / H)


class Past(NamedTuple):
    """Keys and values of the tokens so far in every layer."""

    place: Tensor  # (B,) int64, tokens so far
    keys_values: tuple[Kept, ...]  # L times
    # (B, D), the last token after the last layer's self-attention; None before the first step
    attended: Tensor | None = None


class Span(NamedTuple):
    """Slots of the tokens of one step, and the slots that they attend to."""

    rows: Tensor  # (B, 1) int64
    slots: Tensor  # (B, K) int64, where the tokens are written
    mask: Tensor | None  # (B, 1, K, reach) added to scores; None for one token that sees all slots
    reach: int  # leading slots that are in use

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Write `new` (B, K, ...) into the slots of `buffer` (B, room, ...)."""
        if self.mask is None:
            buffer[:, self.reach - 1] = new[:, 0]
        else:
            buffer[self.rows, self.slots] = new.to(buffer.dtype)


def span_of(place: Tensor, K: int, room: int, reach: int | None, dtype: torch.dtype) -> Span:
    """The span of K tokens after `place` (B,).

    A full row overwrites its last slot, so finished rows may keep stepping.

    Args:
        place: (B,) tokens of each row so far.
        K: Number of new tokens.
        room: Slots of a row.
        reach: Tokens of the longest row, the new ones included; None if the host does not know.
        dtype: Dtype of the mask.
    """
    device = place.device
    rows = torch.arange(len(place), device=device)[:, None]
    slots = (place[:, None] + torch.arange(K, device=device)).clamp(max=room - 1)
    reach = room if reach is None else reach
    if K == 1 and device.type == "cpu" and bool((slots == reach - 1).all()):
        return Span(rows, slots, None, reach)
    seen = torch.arange(reach, device=device) <= slots[..., None]  # (B, K, reach)
    return Span(rows, slots, added_mask(seen[:, None], dtype), reach)


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: 0 where `seen` (bool, any shape) is True, else -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def attention_weights(products: Tensor, width: int, mask: Tensor) -> Tensor:
    """Softmax over the frames, computed in float32 at least, in the dtype of the products.

    Args:
        products: Products of queries and keys (B, H, K, T).
        width: Width of a query, D / H.
        mask: Numbers added to the scaled products: 0 where a frame is seen, -inf elsewhere;
            (B, 1, 1, T) or (T,).
    """
    dtype = torch.promote_types(products.dtype, torch.float32)
    scores = torch.add(mask, products.to(dtype), alpha=1 / math.sqrt(width))
    return scores.softmax(-1).to(products.dtype)


class SelfAttention(nn.Module):
    """Causal multi-head attention of tokens to themselves and earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, kept: Kept | None = None, span: Span | None = None) -> Tensor:
        """Mixed values of each token (B, K, D), before the linear layer `out`.

        Args:
            x: Normed tokens (B, K, D).
            kept: Keys and values of earlier tokens, where those of the new ones are written; None
                if the tokens are the whole text.
            span: Slots of the new tokens in `kept`.
        """
        new = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (B, K, H, D / H) each
        share = self.dropout if self.training else 0.0
        queries, keys, values = (part.transpose(1, 2) for part in new)
        mask = None
        if kept is not None and span is not None:
            for buffer, part in zip(kept, new[1:], strict=True):
                span.write(buffer.transpose(1, 2), part)
            if x.shape[1] == 1 and x.device.type == "cpu" and not share:
                return join_heads(_attend_one(queries, kept, span))
            keys, values = (buffer[:, :, : span.reach] for buffer in kept)
            mask = span.mask
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=share, is_causal=kept is None
        )
        return join_heads(mixed)


def _attend_one(queries: Tensor, kept: Kept, span: Span) -> Tensor:
    """Mixed values of one query of each row (B, H, 1, D / H), by plain products.

    On a CPU torch's own attention is slower for a single query.

    Args:
        queries: Queries (B, H, 1, D / H).
        kept: Keys and values.
        span: Slots of the queries' tokens.
    """
    slots, mask = span.reach, span.mask
    if mask is None:
        slots = min(math.ceil(span.reach / SLOTS) * SLOTS, kept[0].shape[2])
        mask = queries.new_zeros(slots)
        mask[span.reach :] = -torch.inf
    keys, values = (buffer[:, :, :slots] for buffer in kept)
    return attention_weights(queries @ keys.transpose(2, 3), keys.shape[-1], mask) @ values


class CrossAttention(nn.Module):
    """Multi-head attention of tokens to the encoder's frames."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys_values(self, frames: Tensor) -> list[Tensor]:
        """Keys and values (B, H, T, D / H) of frames (B, T, D)."""
        return [split_heads(part, self.heads) for part in self.key_value(frames).chunk(2, -1)]

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Mixed values of each token (B, K, D), before the linear layer `out`.

        Args:
            x: Normed tokens (B, K, D).
            keys: Keys of the frames (B, H, T, D / H), from `keys_values`.
            values: Values of the frames, likewise.
            mask: Numbers added to the scores (B, 1, 1, T): 0 for valid frames, -inf for others.
        """
        share = self.dropout if self.training else 0.0
        if x.shape[1] == 1 and x.device.type == "cpu" and not share:
            mixed = self.weights(x, keys, mask) @ values
        else:
            queries = split_heads(self.query(x), self.heads)
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout_p=share)
        return join_heads(mixed)

    def weights(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Attention weights of each token over the frames (B, H, K, T); each row sums to 1."""
        queries = split_heads(self.query(x), self.heads)
        return attention_weights(queries @ keys.transpose(2, 3), keys.shape[-1], mask)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward: residuals, each after a layer norm.

    Args:
        config: An `asrkit.models.AEDConfig`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        D = config.width
        inner = config.expansion * D
        activation = ACTIVATIONS[config.activation]()
        self.self_norm = nn.LayerNorm(D)
        self.self_attention = SelfAttention(D, config.heads, config.dropout)
        self.cross_norm = nn.LayerNorm(D)
        self.cross_attention = CrossAttention(D, config.heads, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(D)
        self.feed_forward = nn.Sequential(nn.Linear(D, inner), activation, nn.Linear(inner, D))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        kept: Kept | None = None,
        span: Span | None = None,
    ) -> Tensor:
        """Tokens (B, K, D) after this layer.

        Args:
            x: Tokens (B, K, D).
            keys: Keys of the frames; see `CrossAttention`.
            values: Values of the frames.
            mask: Mask of the frames.
            kept: Keys and values of earlier tokens; see `SelfAttention`.
            span: Slots of the new tokens in `kept`.
        """
        x = self.self_attend(x, kept, span)
        x = self.cross_attend(x, keys, values, mask)
        return self.feed(x)

    def self_attend(self, x: Tensor, kept: Kept | None = None, span: Span | None = None) -> Tensor:
        """Tokens x (B, K, D) after self-attention."""
        mixed = self.self_attention(self.self_norm(x), kept, span)
        return self.add(x, mixed, self.self_attention.out)

    def cross_attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Tokens x (B, K, D) after cross-attention."""
        mixed = self.cross_attention(self.cross_norm(x), keys, values, mask)
        return self.add(x, mixed, self.cross_attention.out)

    def feed(self, x: Tensor) -> Tensor:
        """Tokens x (B, K, D) after the feed-forward."""
        widen, activation, narrow = self.feed_forward
        return self.add(x, activation(widen(self.feed_forward_norm(x))), narrow)

    def add(self, x: Tensor, mixed: Tensor, out: nn.Module) -> Tensor:
        """x (B, K, D) plus the output of `out`, a plain or prepacked linear layer, for `mixed`."""
        if isinstance(out, PrepackedLinear):
            return out.plus(mixed, x)
        update = out(mixed)
        return x + (self.dropout(update) if self.training else update)
