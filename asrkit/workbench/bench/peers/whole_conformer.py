"""A FastConformer for batches without padding, as exporters and inference engines want it.

No lengths, no masks, no views that a batch size could break: what an engine is given to fuse.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WholeConformer(nn.Module):
    """Features (B, T, F) of whole utterances in, encoded frames (B, T', D) out.

    Its relative positions are constants for one T.

    Args:
        encoder: our FastConformer in eval mode, with full context, whose parts it calls.
        frames: encoded frames T' of what it will be given.
    """

    positions: Tensor

    def __init__(self, encoder: Any, frames: int) -> None:
        super().__init__()
        from asrkit.models.attention import relative_positions

        self.encoder = encoder
        like = torch.zeros(())
        self.register_buffer(
            "positions", relative_positions(frames, 1 - frames, encoder.width, like)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Encoded frames (B, T', D) of features (B, T, F)."""
        subsampling = self.encoder.subsampling
        x = features[:, None]  # (B, 1, T, F)
        for conv in subsampling.convs:
            x = conv(x).relu()
        x = subsampling.out(x.transpose(1, 2).flatten(2))
        if self.encoder.config.scale_input:
            x = x * math.sqrt(self.encoder.width)
        for block in self.encoder.blocks:
            x = self._block(block, x)
        return x

    def _block(self, block: Any, x: Tensor) -> Tensor:
        first_half, second_half = block.feed
        x = x + 0.5 * first_half(x)
        x = x + self._attention(block.attention, block.attention_norm(x))
        gated = F.glu(block.gate(block.conv_norm(x)), -1)
        mixed = block.batch_norm(block.depthwise(gated.transpose(1, 2)))
        x = x + block.pointwise(F.silu(mixed).transpose(1, 2))
        x = x + 0.5 * second_half(x)
        return block.final_norm(x)

    def _attention(self, attention: Any, x: Tensor) -> Tensor:
        H = attention.heads
        T = self.positions.shape[0] // 2
        q, k, v = attention.qkv(x).unflatten(2, (3, H, -1)).unbind(2)  # each (B, T, H, D/H)
        scale = 1 / math.sqrt(q.shape[3])
        by_content = (q + attention.content_bias[:, 0]).transpose(1, 2)
        by_position = (q + attention.position_bias[:, 0]).transpose(1, 2)
        p = attention.position(self.positions).unflatten(1, (H, -1)).permute(1, 2, 0)
        scores = by_position @ p  # (B, H, T, 2T)
        # by key: row t begins T - t columns into its distances
        rows = scores.flatten(2)[..., T:].unflatten(2, (T, 2 * T - 1))[..., :T]
        scores = (by_content @ k.permute(0, 2, 3, 1) + rows) * scale
        mixed = scores.softmax(-1) @ v.transpose(1, 2)
        return attention.out(mixed.transpose(1, 2).flatten(2))
