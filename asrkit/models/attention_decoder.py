"""Encoder-decoder models ("AED"): an encoder, and a Transformer that writes the text by attention.

The decoder is Canary's (arXiv 2406.19674), a Transformer with layer norms first (arXiv 2002.04745):
causal self-attention, attention to the encoder's frames, feed-forward. Whisper's (arXiv 2212.04356)
is the same with other options.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.devices import to_device
from asrkit.models.common import expect_heads, expect_sizes
from asrkit.models.conv import ConvConfig
from asrkit.models.ctc import EncodingModel
from asrkit.models.decoder_layers import DecoderLayer, Memory, Past, added_mask, span_of
from asrkit.models.encoders import EncoderConfig, make_encoder
from asrkit.models.relative_attention import relative_positions
from asrkit.shapes import dims, expect, valid_mask


@dataclass(frozen=True, kw_only=True)
class AEDConfig:
    """Sizes of an `AEDModel`.

    Args:
        vocab_size: Tokens of the decoder, V: those of the text, `bos`, `eos`, `pad` and all others
            of a prompt.
        bos: Token before the text, if there is no prompt.
        eos: Token that ends the text.
        pad: Padding token; its embedding starts as zeros. It may be `eos`, as Whisper's is.
        encoder: Sizes of the encoder.
        width: Width of the decoder, D. A linear layer projects to it from another encoder width.
        layers: Layers of the decoder, L.
        heads: Attention heads, H, a divisor of `width`.
        expansion: Width of the feed-forwards, as a multiple of D.
        most: Positions of the decoder: most tokens of prompt and text together.
        dropout: Share of activations and attention weights dropped in training.
        ctc: Whether the encoder has a CTC head as well, over V tokens and blank, which is V.
        activation: Activation of the feed-forwards, "relu" or "gelu" (Whisper).
        positions: "sines", which are fixed, or "learned" (Whisper).
        embedding_norm: Whether there is a layer norm on tokens and positions; Whisper has none.
        output_bias: Whether the output has a bias; Whisper's has none.
    """

    vocab_size: int
    bos: int
    eos: int
    pad: int
    encoder: EncoderConfig = field(default_factory=ConvConfig)
    width: int = 256
    layers: int = 4
    heads: int = 4
    expansion: int = 4
    most: int = 512
    dropout: float = 0.1
    ctc: bool = False
    activation: Literal["relu", "gelu"] = "relu"
    positions: Literal["sines", "learned"] = "sines"
    embedding_norm: bool = True
    output_bias: bool = True

    def __post_init__(self) -> None:
        expect_sizes(self, "vocab_size width layers heads expansion most")
        V = self.vocab_size
        special = (self.bos, self.eos, self.pad)
        expect(
            min(special) >= 0 and max(special) < V,
            "bos, eos, pad",
            f"tokens from 0 to below vocab_size={V}",
            special,
        )
        expect(
            self.bos not in special[1:],
            "bos, eos, pad",
            "another token for bos than for eos and pad",
            special,
        )
        expect_heads(self)


class AEDModel(EncodingModel):
    """Encoder and attention decoder.

    Decoding uses `prefill`, `init_state` and `step`, with `bos`, `eos`, `max_tokens` and
    `vocab_size`. Positions that are learned are a parameter. The sines are a buffer of the
    checkpoint, since NeMo interleaves sines and cosines and transformers puts the sines first: a
    loader brings the table of its source.
    """

    positions: Tensor  # (most, D)

    def __init__(self, config: AEDConfig) -> None:
        super().__init__()
        V = config.vocab_size
        D = config.width
        self.config = config
        self.bos = config.bos
        self.eos = config.eos
        self.max_tokens = config.most
        self.vocab_size = V
        self.blank = V  # of the CTC head
        self.encoder = make_encoder(config.encoder)
        width = self.encoder.width
        self.encoder_projection = nn.Linear(width, D) if width != D else nn.Identity()
        self.ctc_head = nn.Linear(width, V + 1) if config.ctc else None
        self.embedding = nn.Embedding(V, D)  # also the weight of the output
        self.prepacked_output: nn.Module | None = None  # set by `asrkit.models.optimize`
        self.output_bias = nn.Parameter(torch.zeros(V)) if config.output_bias else None
        self.embedding_norm = nn.LayerNorm(D) if config.embedding_norm else nn.Identity()
        layers = (DecoderLayer(config) for _ in range(config.layers))
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.embedding.weight, std=D**-0.5)
        with torch.no_grad():
            self.embedding.weight[config.pad].zero_()
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.most, D))
            nn.init.normal_(self.positions, std=D**-0.5)
        else:
            self.register_buffer("positions", sines(config.most, D, self.embedding.weight))

    def forward(
        self, features: Tensor, lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of every next token, given the tokens before it (teacher forcing).

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64.
            tokens: Prompt and text (B, U), int64; the padding is any token, or negative.

        Returns:
            Logits (B, U, V), encoded lengths (B,), and the CTC head's log-probabilities
            (B, T', V + 1).
        """
        encoded, lengths, ctc = self.encode(features, lengths)
        return self.logits(encoded, lengths, tokens), lengths, ctc

    def logits(self, encoded: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        """Logits (B, U, V) of the tokens that follow each of `tokens`, all at once.

        Args:
            encoded: Frames (B, T, D) from `encode`.
            lengths: Valid frames (B,).
            tokens: Prompt and text (B, U), int64.
        """
        frames, mask = self.masked_frames(encoded, lengths)
        x = self.embed_text(tokens, len(encoded))
        return self.score(self.apply_layers(x, frames, mask))

    def cross_weights(
        self, encoded: Tensor, lengths: Tensor, tokens: Tensor, memory: Memory | None = None
    ) -> Tensor:
        """Attention weights of the last layer over the frames, averaged over its heads: (B, U, T).

        Args:
            encoded: Frames (B, T, D) from `encode`.
            lengths: Valid frames (B,).
            tokens: Prompt and text (B, U). Row u belongs to the token that follows tokens[:, u].
            memory: The result of `prefill` for these frames, if it is computed already.
        """
        memory = memory or self.prefill(encoded, lengths)
        x = self.embed_text(tokens, len(encoded))
        *lower, last = self.layers
        for layer, keys, values in zip(lower, memory.keys, memory.values, strict=False):
            x = layer(x, keys, values, memory.mask)
        return self.last_weights(last.self_attend(x), memory)

    def last_weights(self, attended: Tensor, memory: Memory) -> Tensor:
        """The last layer's cross-attention weights, averaged over its heads: (B, U, T).

        Args:
            attended: Tokens (B, U, D) after the last layer's self-attention, as `Past` keeps them.
            memory: The result of `prefill`.
        """
        last = self.layers[-1]
        x = last.cross_norm(attended)
        parts = zip(x.split(1), memory.keys[-1].split(1), memory.mask.split(1), strict=True)
        # One text at a time: the weights of all heads take much memory.
        return torch.cat([last.cross_attention.weights(*part).mean(1) for part in parts])

    def apply_layers(self, x: Tensor, frames: Tensor, mask: Tensor) -> Tensor:
        """The output of all layers for whole texts x (B, U, D).

        Args:
            x: Embedded tokens (B, U, D).
            frames: Frames from `masked_frames`.
            mask: Their mask, likewise.
        """
        for layer in self.layers:
            x = layer(x, *layer.cross_attention.keys_values(frames), mask)
        return x

    def score(self, x: Tensor) -> Tensor:
        """Logits (..., V) from the output of the last layer (..., D)."""
        x = self.norm(x)
        if self.prepacked_output is not None:
            return self.prepacked_output(x)
        return F.linear(x, self.embedding.weight, self.output_bias)

    def embed_text(self, tokens: Tensor, B: int) -> Tensor:
        """Input of the first layer (B, U, D) for whole texts (B, U), whose padding is negative."""
        _, U = dims(tokens, "B U", "tokens", B=B)
        wanted = f"1 to max_tokens={self.max_tokens} of them"
        expect(1 <= U <= self.max_tokens, "tokens", wanted, U)
        return self.embed(tokens.clamp(min=0), self.positions[:U])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input of the first layer (B, K, D).

        Args:
            tokens: (B, K) int64 or int32, below V.
            positions: Rows of `self.positions` for the tokens, (B, K, D) or (K, D).
        """
        return self.dropout(self.embedding_norm(self.embedding(tokens) + positions))

    def masked_frames(self, encoded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames with zeros in the padding, and the mask that attention adds to their scores.

        Args:
            encoded: Frames (B, T, D) from `encode`. What is in the padding has no influence.
            lengths: Valid frames (B,), on the frames' device or the host. An utterance of
                length 0 attends to one frame of zeros.

        Returns:
            The frames (B, T, D), and the mask (B, 1, 1, T): 0 for valid frames, -inf for others.
        """
        B, T, _ = dims(encoded, "B T D", "encoded", D=self.config.width)
        dims(lengths, "B", "lengths", B=B)
        dtype = self.positions.dtype
        same = encoded.dtype == dtype or torch.is_autocast_enabled(encoded.device.type)
        expect(
            same,
            "encoded",
            f"{dtype}, as the model's weights are",
            encoded.dtype,
            f"Pass encoded.to({dtype}).",
        )
        valid = to_device(valid_mask(lengths, T), encoded.device)
        frames = encoded.masked_fill(~valid[..., None], 0.0)  # a weight of 0 does not remove a NaN
        seen = to_device(valid_mask(lengths.clamp(min=1), T), encoded.device)
        return frames, added_mask(seen[:, None, None], dtype)

    def prefill(self, encoded: Tensor, lengths: Tensor) -> Memory:
        """What decoding keeps of the frames; see `masked_frames` for the arguments."""
        frames, mask = self.masked_frames(encoded, lengths)
        pairs = [
            [part.contiguous() for part in layer.cross_attention.keys_values(frames)]
            for layer in self.layers
        ]
        keys, values = map(tuple, zip(*pairs, strict=True))
        return Memory(mask, keys, values)

    def init_state(self, memory: Memory, room: int) -> Past:
        """The state before the first token. All its buffers are allocated here.

        Args:
            memory: The result of `prefill`.
            room: Largest number of tokens, prompt included.
        """
        B, H, _, size = memory.keys[0].shape
        place = torch.zeros(B, dtype=torch.int64, device=memory.mask.device)
        kept = (keys.new_zeros(2, B, H, room, size).unbind() for keys in memory.keys)
        return Past(place, tuple(kept))

    def step(
        self, tokens: Tensor, state: Past, memory: Memory, *, reach: int | None = None
    ) -> tuple[Tensor, Past]:
        """Logits (B, K, V) of what follows each of K more tokens, and the state after them.

        Args:
            tokens: (B, K) int64.
            state: The state from `init_state` or the step before. Its buffers are updated in place.
                `state._replace(place=...)` sets rows back to an earlier place.
            memory: The result of `prefill`.
            reach: Upper bound on the slots in use after this step, known on the host, so that
                attention skips empty slots. None: all slots.
        """
        place, kept, _ = state
        K = tokens.shape[1]
        span = span_of(place, K, kept[0][0].shape[2], reach, self.positions.dtype)
        x = self.embed(tokens, self.positions[span.slots])
        rows = zip(self.layers, kept, memory.keys, memory.values, strict=True)
        for layer, own, keys, values in rows:
            attended = layer.self_attend(x, own, span)
            x = layer.feed(layer.cross_attend(attended, keys, values, memory.mask))
        return self.score(x), Past(place + K, kept, attended[:, -1])


def sines(most: int, D: int, like: Tensor) -> Tensor:
    """NeMo's fixed positions (most, D) over sqrt(D), sines and cosines interleaved.

    Args:
        most: Number of positions, from 0.
        D: Width of a position.
        like: A tensor whose device and dtype the result has.
    """
    if like.is_meta:  # torch.arange would import torch's compiler
        return like.new_empty(most, D)
    return relative_positions(most - 1, 0, D, like).flip(0) / math.sqrt(D)
