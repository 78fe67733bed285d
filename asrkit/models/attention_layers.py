"""The layers of an attention decoder, a Transformer with layer norms first (arXiv 2002.04745).

Of cross-attention they compute what a memory of `asrkit.models.attention_memory` asks for.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.models.attention_memory import Memory, attention_weights, join_heads, split_heads
from asrkit.models.packed import PackedLinear, ReadLinear

Activation = Literal["relu", "gelu"]
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


class SelfAttention(nn.Module):
    """Multi-head attention of tokens to themselves and to those before them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values (B, U, 3, H, D / H) of normed tokens x (B, U, D)."""
        return self.qkv(x).unflatten(-1, (3, self.heads, -1))

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Values mixed for each query (B, K, D), which are for `out`.

        Args:
            queries: (B, H, K, D / H).
            keys: (B, H, N, D / H).
            values: (B, H, N, D / H).
            mask: Added to the scores, (B, 1, K, N); None if a query sees all keys.
            causal: Whether query k sees the keys up to the k-th alone.
        """
        share = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=share, is_causal=causal
        )
        return join_heads(mixed)

    def forward(self, x: Tensor) -> Tensor:
        """(B, U, D) for `out`, of a whole text x (B, U, D), normed."""
        queries, keys, values = self.project(x).transpose(1, 3).unbind(2)
        return self.attend(queries, keys, values, None, causal=True)


class CrossAttention(nn.Module):
    """Multi-head attention of tokens to the encoder's frames."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = ReadLinear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys_values(self, frames: Tensor) -> list[Tensor]:
        """Keys and values (B, H, T, D / H) of frames (B, T, D)."""
        return [split_heads(part, self.heads) for part in self.key_value(frames).chunk(2, -1)]

    def by_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of keys and values (H, D / H, D), and the values' bias (H, 1, D / H)."""
        H = self.heads
        key_weight, value_weight = self.key_value.weight.unflatten(0, (2, H, -1))
        bias = self.key_value.bias.unflatten(0, (2, H, 1, -1))[1]
        return key_weight, value_weight, bias

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """(B, K, D) for `out`: frames mixed for each token.

        Args:
            x: Normed tokens (B, K, D).
            keys: Of the frames (B, H, T, D / H), as `keys_values` makes them.
            values: Likewise.
            mask: Added to the scores (B, 1, 1, T): 0 for frames that are seen, -inf for others.
        """
        share = self.dropout if self.training else 0.0
        queries = split_heads(self.query(x), self.heads)
        if x.shape[1] == 1 and x.device.type == "cpu" and not share:
            # of a single query, torch's attention on a CPU takes longer than two plain products
            mixed = attention_weights(queries, keys, mask) @ values
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout_p=share)
        return join_heads(mixed)

    def weights(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """(B, H, K, T): how much each token looks at each frame; sums over frames are 1.

        Args:
            x: Normed tokens (B, K, D).
            keys: Of the frames (B, H, T, D / H), as `keys_values` makes them.
            mask: As of `attend`.
        """
        return attention_weights(split_heads(self.query(x), self.heads), keys, mask)


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
        """x plus what the layer `out` makes of `mixed`: (B, K, D), as all of them.

        Args:
            x: What came in.
            mixed: What attention or the wide layer made of it.
            out: The linear layer that leads back, plain or packed.
        """
        if isinstance(out, PackedLinear):
            return out.plus(mixed, x)
        update = out(mixed)
        if self.training:
            update = self.dropout(update)
        return x + update

    def read(self, x: Tensor) -> Tensor:
        """(B, U, D) after the self-attention of a whole text x (B, U, D)."""
        mixed = self.self_attention(self.self_norm(x))
        return self.add(x, mixed, self.self_attention.out)

    def look(self, number: int, x: Tensor, memory: Memory) -> Tensor:
        """(B, K, D) after cross-attention and feed-forward.

        Args:
            number: Of this layer, from 0.
            x: Tokens after the self-attention (B, K, D).
            memory: Of `AEDModel.remember`.
        """
        mixed = memory.mix(number, self.cross_attention, self.cross_norm(x))
        x = self.add(x, mixed, self.cross_attention.out)
        widen, activation, narrow = self.feed_forward
        return self.add(x, activation(widen(self.feed_forward_norm(x))), narrow)
