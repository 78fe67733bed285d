"""What an attention decoder keeps between steps: of the encoder's frames, and of its own past.

Frames (`remember`), for the cross-attention of each layer:
    "kept"        keys and values of all layers, projected once: 2 L T D numbers an utterance;
    "absorbed"    the frames alone. q . (Wk h) = (Wk^T q) . h, so the key's weight goes to the
                  query, and the value's weight follows the mixing; the bias of the keys cancels in
                  the softmax, that of the values is added once;
    "recomputed"  the frames alone, projected to keys and values again in every step.
Past tokens (`begin`), for the self-attention:
    "kept"        keys and values;
    "states"      what each layer was given, projected to keys and values again in every step;
    "none"        the tokens: every step computes the whole prefix again.

NeMo 3.0 decodes with "recomputed" and "states", as the decoders of its Canary models did when their
speeds were published. All tensors are batch first, as `asrkit.decoders.states` walks them.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from asrkit.models.attention_layers import CrossAttention, DecoderLayer

CROSS = ("kept", "absorbed", "recomputed")
PAST = ("kept", "states", "none")


class Span(NamedTuple):
    """Where the tokens of one step go, and what they may look at."""

    rows: Tensor  # (B, 1) int64
    slots: Tensor  # (B, K) int64, places of the tokens
    mask: Tensor | None  # (B, 1, K, reach) added to scores; None for one token that sees all slots
    reach: int  # leading slots that are looked at


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, H, N, D / H), a view.

    Args:
        x: (B, N, D).
        heads: H, a divisor of D.
    """
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, N, D) of x (B, H, N, D / H)."""
    return x.transpose(1, 2).flatten(2)


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What attention adds to scores: 0 where something is seen, else -inf.

    Args:
        seen: Of any shape, bool.
        dtype: Of the result.
    """
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill(~seen, -torch.inf)


class KeptFrames(NamedTuple):
    """Keys and values of every layer, each in memory of its own, so a product reads them as they
    lie.
    """

    mask: Tensor  # (B, 1, 1, T), 0 for frames that are seen, -inf for others
    keys: tuple[Tensor, ...]  # L times (B, H, T, D / H)
    values: tuple[Tensor, ...]  # likewise

    def like(self) -> Tensor:
        """A tensor with the device and dtype of the memory."""
        return self.keys[0]

    def mix(self, number: int, attention: "CrossAttention", x: Tensor) -> Tensor:
        """Frames mixed for the queries of each token, (B, K, D) for the layer's `out`.

        Args:
            number: Of the layer, from 0.
            attention: Its cross-attention.
            x: Normed tokens (B, K, D).
        """
        return attention.attend(x, self.keys[number], self.values[number], self.mask)

    def weights(self, number: int, attention: "CrossAttention", x: Tensor) -> Tensor:
        """(B, H, K, T) how much each query looks at each frame; sums over frames are 1.

        Args:
            number: Of the layer, from 0.
            attention: Its cross-attention.
            x: Normed tokens (B, K, D).
        """
        return attention.weights(x, self.keys[number], self.mask)


class RecomputedFrames(NamedTuple):
    """The frames, which every layer projects in every step."""

    mask: Tensor  # (B, 1, 1, T), 0 for frames that are seen, -inf for others
    frames: Tensor  # (B, T, D)

    def like(self) -> Tensor:
        """A tensor with the device and dtype of the memory."""
        return self.frames

    def mix(self, number: int, attention: "CrossAttention", x: Tensor) -> Tensor:
        """As `KeptFrames.mix`, from keys and values that are projected here.

        Args:
            number: Of the layer; all of them project the same frames.
            attention: Its cross-attention.
            x: Normed tokens (B, K, D).
        """
        keys, values = attention.keys_values(self.frames)
        return attention.attend(x, keys, values, self.mask)

    def weights(self, number: int, attention: "CrossAttention", x: Tensor) -> Tensor:
        """As `KeptFrames.weights`, from keys that are projected here.

        Args:
            number: Of the layer; all of them project the same frames.
            attention: Its cross-attention.
            x: Normed tokens (B, K, D).
        """
        keys, _ = attention.keys_values(self.frames)
        return attention.weights(x, keys, self.mask)


class AbsorbedFrames(NamedTuple):
    """The frames, which are neither projected nor kept projected."""

    mask: Tensor  # (B, 1, 1, T), 0 for frames that are seen, -inf for others
    frames: Tensor  # (B, T, D)

    def like(self) -> Tensor:
        """A tensor with the device and dtype of the memory."""
        return self.frames

    def mix(self, number: int, attention: "CrossAttention", x: Tensor) -> Tensor:
        """As `KeptFrames.mix`: (2 T + 2 D / H) H D multiplications a query, none a frame.

        Args:
            number: Of the layer; all of them project the same frames.
            attention: Its cross-attention.
            x: Normed tokens (B, K, D).
        """
        weights = self.weights(number, attention, x)
        B, H, K, _ = weights.shape
        mixed = weights.flatten(1, 2) @ self.frames  # (B, H K, D)
        by_head = mixed.view(B, H, K, -1).transpose(0, 1).flatten(1, 2)  # (H, B K, D)
        _, value_weight, value_bias = attention.by_heads()
        values = torch.baddbmm(value_bias, by_head, value_weight.transpose(1, 2))  # (H, B K, D / H)
        return join_heads(values.view(H, B, K, -1).transpose(0, 1))

    def weights(self, number: int, attention: "CrossAttention", x: Tensor) -> Tensor:
        """As `KeptFrames.weights`, from queries that the key's weight is multiplied into.

        Args:
            number: Of the layer; all of them project the same frames.
            attention: Its cross-attention.
            x: Normed tokens (B, K, D).
        """
        queries = split_heads(attention.query(x), attention.heads)
        B, H, K, _ = queries.shape
        key_weight, _, _ = attention.by_heads()
        by_head = queries.transpose(0, 1).flatten(1, 2)  # (H, B K, D / H)
        absorbed = torch.bmm(by_head, key_weight).view(H, B, K, -1).transpose(0, 1)
        scores = absorbed.flatten(1, 2) @ self.frames.transpose(1, 2)  # (B, H K, T)
        return _softmax(scores.view(B, H, K, -1), queries.shape[-1], self.mask)


Memory = KeptFrames | AbsorbedFrames | RecomputedFrames


def _softmax(products: Tensor, width: int, mask: Tensor) -> Tensor:
    """Attention weights of products q . k, in float32 at least while they are computed."""
    dtype = torch.promote_types(products.dtype, torch.float32)
    scores = torch.add(mask, products.to(dtype), alpha=1 / math.sqrt(width))
    return scores.softmax(-1).to(products.dtype)


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the frames of scaled products, (B, H, K, T), in the dtype of the queries.

    Args:
        queries: (B, H, K, D / H).
        keys: (B, H, T, D / H).
        mask: Added to the products: 0 where a frame is seen, -inf elsewhere; (B, 1, 1, T).
    """
    return _softmax(queries @ keys.transpose(2, 3), queries.shape[-1], mask)


class KeptPast(NamedTuple):
    """Keys and values of the tokens so far."""

    place: Tensor  # (B,) int64, tokens so far
    keys_values: tuple[Tensor, ...]  # L times (B, room, 2, H, D / H)

    def room(self) -> int:
        """Most tokens."""
        return self.keys_values[0].shape[1]

    def mix(self, number: int, layer: "DecoderLayer", x: Tensor, span: Span) -> Tensor:
        """Values mixed for each of K new tokens, which are kept: (B, K, D) for the layer's `out`.

        Args:
            number: Of the layer, from 0.
            layer: That layer.
            x: What it is given for the tokens, (B, K, D).
            span: Where the tokens go, and what they look at.
        """
        attention = layer.self_attention
        parts = attention.project(layer.self_norm(x))  # (B, K, 3, H, D / H)
        kept = self.keys_values[number]
        _write(kept, parts[:, :, 1:], span)
        keys, values = kept[:, : span.reach].transpose(1, 3).unbind(2)
        queries = parts[:, :, 0].transpose(1, 2)
        return attention.attend(queries, keys, values, span.mask)


class StatesPast(NamedTuple):
    """What each layer was given so far."""

    place: Tensor  # (B,) int64, tokens so far
    states: Tensor  # (B, L, room, D)

    def room(self) -> int:
        """Most tokens."""
        return self.states.shape[2]

    def mix(self, number: int, layer: "DecoderLayer", x: Tensor, span: Span) -> Tensor:
        """As `KeptPast.mix`: projects the whole prefix.

        Args:
            number: Of the layer, from 0.
            layer: That layer, its weights not packed.
            x: What it is given for the tokens, (B, K, D).
            span: Where the tokens go, and what they look at.
        """
        attention = layer.self_attention
        states = self.states[:, number]
        _write(states, x, span)
        prefix = layer.self_norm(states[:, : span.reach])
        weight, bias = attention.qkv.weight, attention.qkv.bias
        D = x.shape[2]
        queries = F.linear(layer.self_norm(x), weight[:D], bias[:D])
        keys, values = F.linear(prefix, weight[D:], bias[D:]).chunk(2, -1)
        H = attention.heads
        queries, keys, values = (split_heads(part, H) for part in (queries, keys, values))
        return attention.attend(queries, keys, values, span.mask)


class NoPast(NamedTuple):
    """The tokens so far, and nothing that was computed from them."""

    place: Tensor  # (B,) int64, tokens so far
    tokens: Tensor  # (B, room) int64

    def room(self) -> int:
        """Most tokens."""
        return self.tokens.shape[1]


Past = KeptPast | StatesPast | NoPast


def _write(buffer: Tensor, new: Tensor, span: Span) -> None:
    """Write what is new (B, K, ...) into the span's slots of buffer (B, room, ...)."""
    if span.mask is None:
        buffer[:, span.reach - 1] = new[:, 0]
    else:
        buffer[span.rows, span.slots] = new.to(buffer.dtype)


def span_of(
    place: Tensor, K: int, room: int, reach: int | None, dtype: torch.dtype = torch.float32
) -> Span:
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
    bounded = reach is not None
    reach = room if reach is None else reach
    device = place.device
    rows = torch.arange(len(place), device=device)[:, None]
    slots = (place[:, None] + torch.arange(K, device=device)).clamp(max=room - 1)
    if bounded and K == 1 and device.type == "cpu" and bool((slots == reach - 1).all()):
        return Span(rows, slots, None, reach)
    seen = torch.arange(reach, device=device) <= slots[..., None]  # (B, K, reach)
    return Span(rows, slots, added_mask(seen[:, None], dtype), reach)
