"""Encoder-decoder models ("AED"): an encoder, and a Transformer that writes the text by attention.

The decoder is Canary's (arXiv 2406.19674), a Transformer with layer norms first (arXiv 2002.04745):
causal self-attention, attention to the encoder's frames, feed-forward. Whisper's (arXiv 2212.04356)
is the same with other options.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.devices import to_device
from asrkit.models.attention import relative_positions
from asrkit.models.attention_layers import (
    Activation,
    DecoderLayer,
    Memory,
    Past,
    added_mask,
    span_of,
)
from asrkit.models.encoders import ConvConfig, draw, embedding, expect_heads, expect_sizes
from asrkit.models.transducer import EncoderConfig, EncodingModel, make_encoder
from asrkit.shapes import dims, expect, valid_mask


@dataclass(frozen=True, kw_only=True)
class AEDConfig:
    """Sizes of an `AEDModel`.

    Args:
        vocab_size: Tokens of the decoder, V: those of the text, `bos`, `eos`, `pad` and whatever
            else a prompt holds.
        bos: Token before the text, where no prompt is given.
        eos: Token that ends the text.
        pad: Token that fills rows; its embedding starts as zeros. It may be `eos`, as Whisper's is.
        encoder: Sizes of the encoder.
        width: Width of the decoder, D. A linear layer leads there where the encoder has another.
        layers: Layers of the decoder, L.
        heads: Attention heads, H, a divisor of `width`.
        expansion: Width of the feed-forwards, in D.
        most: Tokens that the decoder has positions for, prompt and text together.
        dropout: Share of activations and attention weights dropped in training.
        ctc: Whether the encoder has a CTC head as well, over V tokens and blank, which is V.
        activation: Of the feed-forwards, "relu" or "gelu" (Whisper).
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
    activation: Activation = "relu"
    positions: Literal["sines", "learned"] = "sines"
    embedding_norm: bool = True
    output_bias: bool = True

    def __post_init__(self) -> None:
        expect_sizes(self, "vocab_size width layers heads expansion most")
        V = self.vocab_size
        special = (self.bos, self.eos, self.pad)
        inside = min(special) >= 0 and max(special) < V
        expect(inside, "bos, eos, pad", f"tokens from 0 to below vocab_size={V}", special)
        differs = self.bos not in special[1:]
        expect(differs, "bos, eos, pad", "another token for bos than for eos and pad", special)
        expect_heads(self)


class AEDModel(EncodingModel):
    """Encoder and attention decoder.

    `remember`, `begin` and `follow` are what decoding asks for, with `bos`, `eos`, `most` and
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
        self.most = config.most
        self.vocab_size = V
        self.blank = V  # of the CTC head
        self.encoder = make_encoder(config.encoder)
        self.encoder_projection = nn.Identity()
        if self.encoder.width != D:
            self.encoder_projection = nn.Linear(self.encoder.width, D)
        self.ctc_head = nn.Linear(self.encoder.width, V + 1) if config.ctc else None
        self.embedding = embedding(V, D)  # the output's weight as well
        self.packed_output: nn.Module | None = None  # of `asrkit.models.optimize`
        self.output_bias: nn.Parameter | None = None
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(V))
        self.embedding_norm: nn.Module = nn.Identity()
        if config.embedding_norm:
            self.embedding_norm = nn.LayerNorm(D)
        layers = (
            DecoderLayer(
                D,
                config.heads,
                inner=config.expansion * D,
                activation=config.activation,
                dropout=config.dropout,
            )
            for _ in range(config.layers)
        )
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        draw(self.embedding.weight, D**-0.5)
        with torch.no_grad():
            self.embedding.weight[config.pad].zero_()
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.most, D))
            draw(self.positions, D**-0.5)
        else:
            self.register_buffer("positions", sines(config.most, D, self.embedding.weight))

    def forward(
        self, features: Tensor, lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of every next token, given the tokens before it (teacher forcing).

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64.
            tokens: Prompt and text (B, U), int64; filled with any token or a negative number.

        Returns:
            Logits (B, U, V), encoded lengths (B,), and the CTC head's log-probabilities
            (B, T', V + 1).
        """
        encoded, lengths, ctc = self.encode(features, lengths)
        return self.logits(encoded, lengths, tokens), lengths, ctc

    def logits(self, encoded: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        """Logits (B, U, V) of the tokens that follow each of `tokens`, all at once.

        Args:
            encoded: Frames (B, T, D) of `encode`.
            lengths: Valid frames (B,).
            tokens: Prompt and text (B, U), int64.
        """
        frames, mask = self.heard(encoded, lengths)
        x = self.embed_text(tokens, len(encoded))
        return self.score(self.through(self.layers, x, frames, mask))

    def looks(
        self, encoded: Tensor, lengths: Tensor, tokens: Tensor, memory: Memory | None = None
    ) -> Tensor:
        """(B, U, T): how much the last layer's heads look at each frame, in the mean.

        Args:
            encoded: Frames (B, T, D) of `encode`.
            lengths: Valid frames (B,).
            tokens: Prompt and text (B, U); row u belongs to the token that follows tokens[:, u].
            memory: What `remember` returns for these frames, where it is there already.
        """
        memory = memory or self.remember(encoded, lengths)
        x = self.embed_text(tokens, len(encoded))
        *lower, last = self.layers
        for layer, keys, values in zip(lower, memory.keys, memory.values, strict=False):
            x = layer.look(layer.read(x), keys, values, memory.mask)
        x = last.cross_norm(last.read(x))
        parts = zip(x.split(1), memory.keys[-1].split(1), memory.mask.split(1), strict=True)
        # of one text after the other, for the weights of all heads take much memory
        return torch.cat([last.cross_attention.weights(*part).mean(1) for part in parts])

    def through(
        self, layers: Iterable[DecoderLayer], x: Tensor, frames: Tensor, mask: Tensor
    ) -> Tensor:
        """What these layers make of a whole text x (B, U, D), with frames and mask of `heard`."""
        for layer in layers:
            keys, values = layer.cross_attention.keys_values(frames)
            x = layer.look(layer.read(x), keys, values, mask)
        return x

    def score(self, x: Tensor) -> Tensor:
        """Logits (..., V) of what the last layer gives (..., D)."""
        x = self.norm(x)
        if self.packed_output is not None:
            return self.packed_output(x)
        return F.linear(x, self.embedding.weight, self.output_bias)

    def embed_text(self, tokens: Tensor, B: int) -> Tensor:
        """(B, U, D), the input of the first layer, of whole texts (B, U); what is negative is
        padding.
        """
        _, U = dims(tokens, "B U", "tokens", B=B)
        expect(1 <= U <= self.most, "tokens", f"1 to most={self.most} of them", U)
        return self.embed(tokens.clamp(min=0), self.positions[:U])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, K, D), the input of the first layer.

        Args:
            tokens: (B, K) int64 or int32, below V.
            positions: What stands for their places, (B, K, D) or (K, D).
        """
        return self.dropout(self.embedding_norm(self.embedding(tokens) + positions))

    def heard(self, encoded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T, D) with zeros behind `lengths`, and what attention adds to their scores.

        Args:
            encoded: Frames (B, T, D) of `encode`; what lies behind `lengths` has no influence.
            lengths: Valid frames (B,), on the frames' device or the host. An utterance without any
                sees one frame of zeros.

        Returns:
            The frames, and (B, 1, 1, T): 0 for frames that are seen, -inf for others.
        """
        B, T, _ = dims(encoded, "B T D", "encoded", D=self.config.width)
        dims(lengths, "B", "lengths", B=B)
        dtype = self.positions.dtype
        same = encoded.dtype == dtype or torch.is_autocast_enabled(encoded.device.type)
        remedy = f"Pass encoded.to({dtype})."
        expect(same, "encoded", f"{dtype}, as the model's weights are", encoded.dtype, remedy)
        valid = to_device(valid_mask(lengths, T), encoded.device)
        frames = encoded.masked_fill(~valid[..., None], 0.0)  # 0 weights do not undo a NaN
        seen = to_device(valid_mask(lengths.clamp(min=1), T), encoded.device)
        return frames, added_mask(seen[:, None, None], dtype)

    def remember(self, encoded: Tensor, lengths: Tensor) -> Memory:
        """What decoding keeps of the frames; arguments as of `heard`."""
        frames, mask = self.heard(encoded, lengths)
        pairs = [
            [part.contiguous() for part in layer.cross_attention.keys_values(frames)]
            for layer in self.layers
        ]
        keys, values = map(tuple, zip(*pairs, strict=True))
        return Memory(mask, keys, values)

    def begin(self, memory: Memory, room: int) -> Past:
        """The state before the first token; all its memory is allocated here.

        Args:
            memory: Of `remember`.
            room: Most tokens, prompt included.
        """
        B, H, _, size = memory.keys[0].shape
        place = torch.zeros(B, dtype=torch.int64, device=memory.mask.device)
        kept = [keys.new_zeros(B, room, 2, H, size) for keys in memory.keys]
        return Past(place, tuple(kept))

    def follow(
        self, tokens: Tensor, state: Past, memory: Memory, *, reach: int | None = None
    ) -> tuple[Tensor, Past]:
        """Logits (B, K, V) of what follows each of K more tokens, and the state after them.

        Args:
            tokens: (B, K) int64.
            state: Of `begin` or `follow`; its buffers are written. `state._replace(place=...)` sets
                rows back to an earlier place.
            memory: Of `remember`.
            reach: Slots of the state that are in use once the tokens are in; None is its whole
                room. A bound that the host knows, so a step need not look at slots still empty.
        """
        place, kept = state
        K = tokens.shape[1]
        span = span_of(place, K, kept[0].shape[1], reach, self.positions.dtype)
        x = self.embed(tokens, self.positions[span.slots])
        rows = zip(self.layers, kept, memory.keys, memory.values, strict=True)
        for layer, own, keys, values in rows:
            x = layer.look(layer.read(x, own, span), keys, values, memory.mask)
        return self.score(x), Past(place + K, kept)


def sines(most: int, D: int, like: Tensor) -> Tensor:
    """Fixed positions (most, D) over sqrt(D): sine and cosine interleaved, as NeMo's.

    Args:
        most: Positions, from 0.
        D: Width of a position.
        like: A tensor whose device and dtype the result has.
    """
    if like.is_meta:  # as in `asrkit.models.encoders.draw`
        return like.new_empty(most, D)
    rising = relative_positions(most - 1, 0, D, like).flip(0)
    return rising / math.sqrt(D)
