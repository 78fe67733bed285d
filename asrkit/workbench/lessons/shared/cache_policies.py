"""Four cache policies of an attention decoder. All return the same text.

The cache of the frames, for the cross-attention of each layer (`cross`):
    "kept"        keys and values of all layers, projected once: 2 L T D numbers per utterance;
    "absorbed"    the frames only. q . (Wk h) = (Wk^T q) . h, so the key's weight is applied to the
                  query, and the value's weight after mixing. The bias of the keys cancels in the
                  softmax; that of the values is added once;
    "recomputed"  the frames only, projected to keys and values again in every step.
The cache of the text so far, for the self-attention (`past`):
    "kept"        keys and values;
    "states"      the input of each layer, projected to keys and values again in every step;
    "none"        the tokens: every step computes the whole prefix again.

`asrkit.models.AEDModel` keeps keys and values of both. NeMo 3.0 uses "recomputed" and "states", as
its Canary models did when their speeds were published.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asrkit.models.common import join_heads, split_heads
from asrkit.models.decoder_layers import (
    CrossAttention,
    Past,
    SelfAttention,
    Span,
    attention_weights,
    span_of,
)


class CachePolicy(NamedTuple):
    """What decoding caches of the frames (`cross`) and of the text so far (`past`)."""

    cross: Literal["kept", "absorbed", "recomputed"]
    past: Literal["kept", "states", "none"]


POLICIES = {
    "no cache": CachePolicy("recomputed", "none"),
    "NeMo 3.0": CachePolicy("recomputed", "states"),
    "KV cache": CachePolicy("kept", "kept"),
    "absorbed": CachePolicy("absorbed", "kept"),
}


class Frames(NamedTuple):
    """The frames without keys and values."""

    mask: Tensor  # (B, 1, 1, T), 0 for valid frames, -inf for padding
    frames: Tensor  # (B, T, D)


class States(NamedTuple):
    """The inputs of each layer so far."""

    place: Tensor  # (B,) int64, tokens so far
    buffers: tuple[Tensor, ...]  # L times (B, room, D)


class Tokens(NamedTuple):
    """The tokens so far without keys and values."""

    place: Tensor  # (B,) int64, tokens so far
    buffers: tuple[Tensor]  # (B, room) int64


def with_policy(model: Any, policy: CachePolicy) -> Any:
    """The `AEDModel` with one of POLICIES, for `aed_greedy`; its layers must not be packed."""
    return model if policy == POLICIES["KV cache"] else _WithPolicy(model, policy)


class _WithPolicy:
    """A model that does not cache the keys and values of the frames."""

    def __init__(self, model: Any, policy: CachePolicy) -> None:
        self.model = model
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prefill(self, encoded: Tensor, lengths: Tensor) -> Frames:
        """As the model's; caches the frames only."""
        frames, mask = self.model.masked_frames(encoded, lengths)
        return Frames(mask, frames)

    def init_state(self, memory: Frames, room: int) -> Any:
        """As the model's, with the cache of the text that the policy needs."""
        config = self.model.config
        B, _, D = memory.frames.shape
        place = torch.zeros(B, dtype=torch.int64, device=memory.mask.device)
        if self.policy.past == "none":
            return Tokens(place, (place.new_full((B, room), config.pad),))
        if self.policy.past == "states":
            buffers = [memory.frames.new_zeros(B, room, D) for _ in range(config.layers)]
            return States(place, tuple(buffers))
        shape = (2, B, config.heads, room, D // config.heads)
        kept = (memory.frames.new_zeros(shape).unbind() for _ in range(config.layers))
        return Past(place, tuple(kept))

    def step(
        self, tokens: Tensor, state: Any, memory: Frames, *, reach: int | None = None
    ) -> tuple[Tensor, Any]:
        """As the model's."""
        model = self.model
        place, buffers = state[:2]
        K = tokens.shape[1]
        held = buffers[0]
        room = held[0].shape[2] if isinstance(held, tuple) else held.shape[1]
        span = span_of(place, K, room, reach, memory.frames.dtype)
        after = state._replace(place=place + K)
        if self.policy.past == "none":
            (text,) = buffers
            span.write(text, tokens)
            x = model.embed_text(text[:, : span.reach], len(text))
            x = model.apply_layers(x, memory.frames, memory.mask)
            return model.score(x[span.rows, span.slots]), after
        x = model.embed(tokens, model.positions[span.slots])
        for layer, buffer in zip(model.layers, buffers, strict=True):
            if self.policy == POLICIES["NeMo 3.0"]:
                mixed = from_states(layer.self_attention, layer.self_norm, x, buffer, span)
                x = layer.add(x, mixed, layer.self_attention.out)
                keys, values = layer.cross_attention.keys_values(memory.frames)
                x = layer.cross_attend(x, keys, values, memory.mask)
            else:
                x = layer.self_attend(x, buffer, span)
                mixed = absorbed(layer.cross_attention, layer.cross_norm(x), memory)
                x = layer.add(x, mixed, layer.cross_attention.out)
            x = layer.feed(x)
        return model.score(x), after


def from_states(
    attention: SelfAttention, norm: Any, x: Tensor, states: Tensor, span: Span
) -> Tensor:
    """Self-attention that projects the whole prefix to keys and values: (B, K, D) for `out`.

    Args:
        attention: self-attention of a layer.
        norm: norm before it.
        x: input of the layer for K new tokens (B, K, D).
        states: its inputs so far (B, room, D); the new ones are written there.
        span: places of the tokens, and their mask.
    """
    span.write(states, x)
    weight, bias = attention.qkv.weight, attention.qkv.bias
    D = x.shape[2]
    queries = F.linear(norm(x), weight[:D], bias[:D])
    prefix = norm(states[:, : span.reach])
    keys, values = F.linear(prefix, weight[D:], bias[D:]).chunk(2, -1)
    queries, keys, values = (split_heads(x, attention.heads) for x in (queries, keys, values))
    return join_heads(F.scaled_dot_product_attention(queries, keys, values, attn_mask=span.mask))


def absorbed(attention: CrossAttention, x: Tensor, memory: Frames) -> Tensor:
    """Cross-attention that projects no frame: (B, K, D) for `out`.

    It takes (2 T + 2 D / H) H D multiplications per query, and none per frame.

    Args:
        attention: cross-attention of a layer.
        x: normed tokens (B, K, D).
        memory: the frames.
    """
    queries = split_heads(attention.query(x), attention.heads)
    B, H, K, size = queries.shape
    key_weight, value_weight = attention.key_value.weight.unflatten(0, (2, H, -1))
    value_bias = attention.key_value.bias.unflatten(0, (2, H, 1, -1))[1]  # (H, 1, D / H)
    wide = torch.bmm(queries.transpose(0, 1).flatten(1, 2), key_weight)  # (H, B K, D)
    wide = wide.view(H, B, K, -1).transpose(0, 1).flatten(1, 2)  # (B, H K, D)
    scores = (wide @ memory.frames.transpose(1, 2)).view(B, H, K, -1)
    weights = attention_weights(scores, size, memory.mask)
    mixed = weights.flatten(1, 2) @ memory.frames  # (B, H K, D)
    by_head = mixed.view(B, H, K, -1).transpose(0, 1).flatten(1, 2)  # (H, B K, D)
    values = torch.baddbmm(value_bias, by_head, value_weight.transpose(1, 2))  # (H, B K, D / H)
    return join_heads(values.view(H, B, K, -1).transpose(0, 1))
