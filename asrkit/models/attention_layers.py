"""The layers of an attention decoder, a Transformer with layer norms first (arXiv 2002.04745), and
what it keeps between steps: keys and values of the encoder's frames, and of its own past.

All tensors are batch first, as `asrkit.decoders.states` walks them.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.models.packed import PackedLinear

Activation = Literal["relu", "gelu"]
# On a CPU a single token of rows that are equally long looks at a multiple of so many slots: oneDNN
# keeps code for each size of a product, 150 MiB for those of one recording of eight minutes.
SLOTS = 32
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


class Memory(NamedTuple):
    """Keys and values of the encoder's frames in every layer.

    Each lies in memory of its own, so a product reads it as it lies.
    """

    mask: Tensor  # (B, 1, 1, T), 0 for frames that are seen, -inf for others
    keys: tuple[Tensor, ...]  # L times (B, H, T, D / H)
    values: tuple[Tensor, ...]  # likewise


class Past(NamedTuple):
    """Keys and values of the tokens so far in every layer."""

    place: Tensor  # (B,) int64, tokens so far
    keys_values: tuple[Tensor, ...]  # L times (B, room, 2, H, D / H)
    # (B, D), the last token after the last layer's self-attention; None before the first step
    attended: Tensor | None = None


class Span(NamedTuple):
    """Where the tokens of one step go, and what they may look at."""

    rows: Tensor  # (B, 1) int64
    slots: Tensor  # (B, K) int64, places of the tokens
    mask: Tensor | None  # (B, 1, K, reach) added to scores; None for one token that sees all slots
    reach: int  # leading slots that are in use

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Write what is new (B, K, ...) into the slots of buffer (B, room, ...)."""
        if self.mask is None:
            buffer[:, self.reach - 1] = new[:, 0]
        else:
            buffer[self.rows, self.slots] = new.to(buffer.dtype)


def span_of(place: Tensor, K: int, room: int, reach: int | None, dtype: torch.dtype) -> Span:
    """The span of K tokens behind `place` (B,).

    Slots end with the room: a row that is full overwrites its last slot, so whoever goes on with
    rows that have ended needs no care.

    Args:
        place: (B,) tokens of each row so far.
        K: Tokens that are new.
        room: Most tokens.
        reach: Tokens of the longest row once they are in; None if the host does not know.
        dtype: Of the mask.
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
    """What attention adds to scores: 0 where `seen` (of any shape, bool), else -inf."""
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill(~seen, -torch.inf)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, H, N, D / H), a view of x (B, N, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, N, D) of x (B, H, N, D / H)."""
    return x.transpose(1, 2).flatten(2)


def attention_weights(products: Tensor, width: int, mask: Tensor) -> Tensor:
    """Softmax over the frames, in float32 at least while it is computed; in the products' dtype.

    Args:
        products: Of queries and keys (B, H, K, T).
        width: Of both, D / H.
        mask: Added to the products: 0 where a frame is seen, -inf elsewhere; (B, 1, 1, T) or (T,).
    """
    dtype = torch.promote_types(products.dtype, torch.float32)
    scores = torch.add(mask, products.to(dtype), alpha=1 / math.sqrt(width))
    return scores.softmax(-1).to(products.dtype)


class SelfAttention(nn.Module):
    """Multi-head attention of tokens to themselves and to those before them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, kept: Tensor | None = None, span: Span | None = None) -> Tensor:
        """Values mixed for each token (B, K, D), which are for `out`.

        Args:
            x: Normed tokens (B, K, D).
            kept: Keys and values of earlier tokens (B, room, 2, H, D / H), where those of the new
                ones are written; None if the tokens are the whole text.
            span: Where the new tokens go.
        """
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        share = self.dropout if self.training else 0.0
        mask = None
        if kept is None or span is None:
            queries, keys, values = parts.transpose(1, 3).unbind(2)
        else:
            span.write(kept, parts[:, :, 1:])
            queries = parts[:, :, 0].transpose(1, 2)
            if x.shape[1] == 1 and x.device.type == "cpu" and not share:
                return join_heads(_mixed_for_one(queries, kept, span))
            keys, values = kept[:, : span.reach].transpose(1, 3).unbind(2)
            mask = span.mask
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=share, is_causal=kept is None
        )
        return join_heads(mixed)


def _mixed_for_one(queries: Tensor, kept: Tensor, span: Span) -> Tensor:
    """Values mixed for one query of each row (B, H, 1, D / H), by plain products: torch's attention
    takes longer for it on a CPU.

    Args:
        queries: (B, H, 1, D / H).
        kept: Keys and values (B, room, 2, H, D / H).
        span: Where the queries' tokens are.
    """
    slots, mask = span.reach, span.mask
    if mask is None:
        slots = min(math.ceil(span.reach / SLOTS) * SLOTS, kept.shape[1])
        mask = queries.new_zeros(slots)
        mask[span.reach :] = -torch.inf
    keys, values = kept[:, :slots].transpose(1, 3).unbind(2)
    products = queries @ keys.transpose(2, 3)
    return attention_weights(products, keys.shape[-1], mask) @ values


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
        """(B, K, D) for `out`: frames mixed for each token.

        Args:
            x: Normed tokens (B, K, D).
            keys: Of the frames (B, H, T, D / H), as `keys_values` makes them.
            values: Likewise.
            mask: Added to the scores (B, 1, 1, T): 0 for frames that are seen, -inf for others.
        """
        share = self.dropout if self.training else 0.0
        if x.shape[1] == 1 and x.device.type == "cpu" and not share:
            mixed = self.weights(x, keys, mask) @ values
        else:
            queries = split_heads(self.query(x), self.heads)
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout_p=share)
        return join_heads(mixed)

    def weights(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """(B, H, K, T): how much each token looks at each frame, as of `forward`; in sum 1."""
        queries = split_heads(self.query(x), self.heads)
        return attention_weights(queries @ keys.transpose(2, 3), keys.shape[-1], mask)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward, each behind a layer norm, as residuals.

    Args:
        width: Of a token, D.
        heads: Attention heads, H.
        inner: Width of the feed-forward.
        activation: Of the feed-forward, "relu" or "gelu".
        dropout: Share of activations and attention weights dropped in training.
    """

    def __init__(
        self, width: int, heads: int, *, inner: int, activation: Activation, dropout: float
    ) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = SelfAttention(width, heads, dropout)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = CrossAttention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, inner), ACTIVATIONS[activation](), nn.Linear(inner, width)
        )
        self.dropout = nn.Dropout(dropout)

    def add(self, x: Tensor, mixed: Tensor, out: nn.Module) -> Tensor:
        """x (B, K, D) plus what the linear layer `out`, plain or packed, makes of `mixed`."""
        if isinstance(out, PackedLinear):
            return out.plus(mixed, x)
        update = out(mixed)
        return x + (self.dropout(update) if self.training else update)

    def read(self, x: Tensor, kept: Tensor | None = None, span: Span | None = None) -> Tensor:
        """(B, K, D) after the self-attention of tokens x (B, K, D); see `SelfAttention`."""
        mixed = self.self_attention(self.self_norm(x), kept, span)
        return self.add(x, mixed, self.self_attention.out)

    def look(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """(B, K, D) after cross-attention and feed-forward; see `CrossAttention`."""
        return self.finish(x, self.cross_attention(self.cross_norm(x), keys, values, mask))

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What `look` makes of frames that are mixed already (B, K, D)."""
        x = self.add(x, mixed, self.cross_attention.out)
        widen, activation, narrow = self.feed_forward
        return self.add(x, activation(widen(self.feed_forward_norm(x))), narrow)
