"""Four cache policies of decoding by attention, by what is kept between two steps; one text.

Of the frames, for the cross-attention of each layer (`cross`):
    "kept"        keys and values of all layers, projected once: 2 L T D numbers an utterance;
    "absorbed"    the frames alone. q . (Wk h) = (Wk^T q) . h, so the key's weight goes to the
                  query, and the value's weight follows the mixing; the bias of the keys cancels in
                  the softmax, that of the values is added once;
    "recomputed"  the frames alone, projected to keys and values again in every step.
Of the text so far, for the self-attention (`past`):
    "kept"        keys and values;
    "states"      what each layer was given, projected to keys and values again in every step;
    "none"        the tokens: every step computes the whole prefix again.

`asrkit.models.AEDModel` keeps keys and values of both. NeMo 3.0 decodes with "recomputed" and
"states", as the decoders of its Canary models did when their speeds were published.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asrkit.models.attention_layers import (
    CrossAttention,
    Past,
    SelfAttention,
    Span,
    attention_weights,
    join_heads,
    span_of,
    split_heads,
)


class CachePolicy(NamedTuple):
    """What decoding keeps: `cross` of the frames, `past` of the text so far."""

    cross: Literal["kept", "absorbed", "recomputed"]
    past: Literal["kept", "states", "none"]


POLICIES = {
    "no cache": CachePolicy("recomputed", "none"),
    "NeMo 3.0": CachePolicy("recomputed", "states"),
    "KV cache": CachePolicy("kept", "kept"),
    "absorbed": CachePolicy("absorbed", "kept"),
}


class Frames(NamedTuple):
    """The frames, and nothing that was computed from them."""

    mask: Tensor  # (B, 1, 1, T), 0 for frames that are seen, -inf for others
    frames: Tensor  # (B, T, D)


class States(NamedTuple):
    """What each layer was given so far."""

    place: Tensor  # (B,) int64, tokens so far
    buffers: tuple[Tensor, ...]  # L times (B, room, D)


class Tokens(NamedTuple):
    """The tokens so far, and nothing that was computed from them."""

    place: Tensor  # (B,) int64, tokens so far
    buffers: tuple[Tensor]  # (B, room) int64


def with_policy(model: Any, policy: CachePolicy) -> Any:
    """An `AEDModel` that `aed_greedy` decodes with one of POLICIES; its layers not packed."""
    return model if policy == POLICIES["KV cache"] else _WithPolicy(model, policy)


class _WithPolicy:
    """A model whose frames are not kept as keys and values."""

    def __init__(self, model: Any, policy: CachePolicy) -> None:
        self.model = model
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prefill(self, encoded: Tensor, lengths: Tensor) -> Frames:
        """As the model's, the frames alone."""
        frames, mask = self.model.heard(encoded, lengths)
        return Frames(mask, frames)

    def init_state(self, memory: Frames, room: int) -> Any:
        """As the model's, with what is kept of the text."""
        config = self.model.config
        B, _, D = memory.frames.shape
        place = torch.zeros(B, dtype=torch.int64, device=memory.mask.device)
        if self.policy.past == "none":
            return Tokens(place, (place.new_full((B, room), config.pad),))
        if self.policy.past == "states":
            buffers = [memory.frames.new_zeros(B, room, D) for _ in range(config.layers)]
            return States(place, tuple(buffers))
        shape = (B, room, 2, config.heads, D // config.heads)
        kept = [memory.frames.new_zeros(shape) for _ in range(config.layers)]
        return Past(place, tuple(kept))

    def step(
        self, tokens: Tensor, state: Any, memory: Frames, *, reach: int | None = None
    ) -> tuple[Tensor, Any]:
        """As the model's."""
        model = self.model
        place, buffers = state[:2]
        K = tokens.shape[1]
        span = span_of(place, K, buffers[0].shape[1], reach, memory.frames.dtype)
        after = state._replace(place=place + K)
        if self.policy.past == "none":
            (text,) = buffers
            span.write(text, tokens)
            x = model.embed_text(text[:, : span.reach], len(text))
            x = model.through(model.layers, x, memory.frames, memory.mask)
            return model.score(x[span.rows, span.slots]), after
        x = model.embed(tokens, model.positions[span.slots])
        for layer, buffer in zip(model.layers, buffers, strict=True):
            if self.policy == POLICIES["NeMo 3.0"]:
                mixed = from_states(layer.self_attention, layer.self_norm, x, buffer, span)
                x = layer.add(x, mixed, layer.self_attention.out)
                keys, values = layer.cross_attention.keys_values(memory.frames)
                x = layer.look(x, keys, values, memory.mask)
            else:
                x = layer.read(x, buffer, span)
                mixed = absorbed(layer.cross_attention, layer.cross_norm(x), memory)
                x = layer.finish(x, mixed)
        return model.score(x), after


def from_states(
    attention: SelfAttention, norm: Any, x: Tensor, states: Tensor, span: Span
) -> Tensor:
    """Self-attention that projects the whole prefix to keys and values: (B, K, D) for `out`.

    Args:
        attention: Of a layer.
        norm: What is before it.
        x: What the layer is given for K new tokens (B, K, D).
        states: What it was given so far (B, room, D); the new are written there.
        span: Where the tokens go, and what they look at.
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

    (2 T + 2 D / H) H D multiplications a query, none a frame.

    Args:
        attention: Of a layer.
        x: Normed tokens (B, K, D).
        memory: The frames.
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
