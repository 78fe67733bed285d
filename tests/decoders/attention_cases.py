"""Models for attention decoding, ours and a table without rounding, and frames for them."""

from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses
from asrkit.models import AEDConfig, AEDModel, ConvConfig

V, EOS, WIDTH = 11, 2, 8
OPTIONS = {"max_labels": 9, "confidence": True}


class TextSoFar(NamedTuple):
    place: Tensor  # (B,)
    tokens: Tensor  # (B, room)


class Story:
    """Not a module: the next token comes from a hash of the frames and the text, so nothing is rounded.

    It has only the protocol, counts its calls, and may give NaN after some texts.
    """

    bos = 1
    eos = EOS
    max_tokens = 64
    vocab_size = V

    def __init__(self, seed=0, nan_share=0, eos_share=15):
        self.seed, self.nan_share, self.eos_share, self.calls = (
            seed,
            nan_share,
            eos_share,
            [],
        )

    def prefill(self, encoded, lengths):
        valid = torch.arange(encoded.shape[1]) < lengths[:, None]
        return (encoded[..., 0].masked_fill(~valid, 0).sum(1).long(),)

    def init_state(self, memory, room):
        place = torch.zeros_like(memory[0])
        return TextSoFar(place, place.new_zeros(len(place), room))

    def step(self, tokens, state, memory, *, reach):
        B, K = tokens.shape
        self.calls.append(K)
        room = state.tokens.shape[1]
        slots = (state.place[:, None] + torch.arange(K)).clamp(max=room - 1)
        state.tokens.scatter_(1, slots, tokens)
        hashes = []
        mixed = memory[0] + self.seed
        for column in state.tokens.T:
            mixed = (mixed * 31 + column + 7) % 65_521
            hashes.append(mixed)
        mixed = torch.stack(hashes, 1).gather(1, slots) * 2_654_435_761 >> 8
        ends = mixed % 100 < self.eos_share
        token = torch.where(ends, EOS, 3 + mixed // 100 % (V - 3))
        logits = 8.0 * torch.nn.functional.one_hot(token, V)
        broken = mixed // 1000 % 100 < self.nan_share
        logits = logits.masked_fill(broken[..., None], torch.nan)
        return logits, state._replace(place=state.place + K)

    def cross_weights(self, encoded, lengths, tokens, memory=None):
        return torch.nn.functional.one_hot(tokens % 4, 4).float()


def random_model(seed=0, dtype=torch.float64, eos=0.0, **settings):
    torch.manual_seed(seed)
    sizes = {
        "encoder": ConvConfig(bins=4, width=6, layers=1),
        "width": WIDTH,
        "heads": 2,
    }
    config = AEDConfig(
        vocab_size=V, pad=0, bos=1, eos=EOS, layers=2, most=32, **sizes | settings
    )
    model = AEDModel(config)
    model.embedding.weight.data.mul_(4)  # else it repeats one token for any frames
    model.positions.mul_(4)
    for layer in model.layers:
        torch.nn.init.normal_(layer.cross_attention.key_value.bias)
        self_attention = layer.self_attention
        cross_attention = layer.cross_attention
        for sharper in (
            self_attention.qkv,
            cross_attention.query,
            cross_attention.key_value,
        ):
            sharper.weight.data.mul_(5)
        for louder in (self_attention.out, cross_attention.out, layer.feed_forward[0]):
            louder.weight.data.mul_(3)
        layer.feed_forward[2].weight.data.mul_(9)
    model.output_bias.data[EOS] += eos
    return model.to(dtype).eval()


def frames(B, T, seed=0, dtype=torch.float64, least=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, T + 1, (B,), generator=generator)
    lengths[0] = T
    encoded = torch.randint(0, 251, (B, T, WIDTH), generator=generator).to(dtype)
    return encoded, lengths


def random_frames(B, T, seed=0, dtype=torch.float64, least=0):
    """Frames for a random model."""
    encoded, lengths = frames(B, T, seed, dtype, least)
    return encoded / 125 - 1, lengths


def same(found, wanted, tolerance=1e-5):
    assert found.tokens() == wanted.tokens()
    assert found.ended.tolist() == wanted.ended.tolist()
    for a, b in zip(found.parts(), wanted.parts(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def as_draft(rows):
    """Hypotheses with these labels only."""
    rows = [[(label, -1, 0) for label in row] for row in rows]
    return Hypotheses.from_lists(rows, [torch.zeros(())] * len(rows), "by hand")
