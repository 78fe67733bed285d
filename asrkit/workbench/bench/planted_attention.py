"""Attention decoders that say a script, so that the length of texts, which decides how fast
decoding is, is not left to chance.

Random weights repeat a token until the limit, and a trained model has one density only. Here a real
`AEDModel` gets weights that follow a script. Half of the channels hold the code of a position, half
that of a token, each a random vector of signs. Positions have such codes instead of sines, whose
neighbours half precision can hardly tell apart. The cross-attention of the first
layer asks with that code, and finds the frame that holds it; the frame's other half is the code of
the token to say next, and the rows of the embedding, which are the output's as well, are these
codes. All other sublayers compute and add noise: labels do not depend on it, but scores do, so a
decoder that loses a token's keys and values is found out.
"""

import math
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.models import AEDConfig, AEDModel, ConvConfig
from asrkit.models.attention_layers import DecoderLayer
from asrkit.models.transducer import EncoderConfig
from asrkit.shapes import expect
from asrkit.workbench.bench.planted import speech

BOS, EOS, PAD = 0, 1, 2
SPECIAL = 3  # tokens that no text holds come first
VALUE = 2.0  # of a token's code in the residual stream, where that of the position is 1
ASK = 30.0  # attention score of the frame that is meant; the others' spread around 0
LOGIT = 8.0  # of the token that is meant, enough to be the best and too little to be certain
NOISE = 0.1  # standard deviation of what is added to a channel of a frame
MURMUR = 0.5  # of what all other sublayers together add to a channel


@dataclass(frozen=True, kw_only=True)
class PlantedDecoder:
    """A model, and the codes by which frames tell it what to say."""

    model: AEDModel
    places: Tensor  # (most, D / 2), of positions
    codes: Tensor  # (V, D / 2), of tokens


@dataclass(frozen=True, kw_only=True)
class PlantedText:
    """A model, a batch for it, and what every greedy decoder has to find in it."""

    model: AEDModel
    encoded: Tensor  # (B, T, D)
    lengths: Tensor  # (B,) int64
    prompt: Tensor  # (P,) int64
    labels: list[list[int]]  # without eos
    frames: list[list[int]]  # that hold these labels

    def steps(self) -> int:
        """Calls of the decoder, one token each: the longest text and its eos."""
        return 1 + max(map(len, self.labels))

    def to(self, device: str, dtype: torch.dtype) -> "PlantedText":
        """The plan with model and batch there; the model is moved itself, not copied."""
        return replace(
            self,
            model=self.model.to(device, dtype),
            encoded=self.encoded.to(device, dtype),
            lengths=self.lengths.to(device),
            prompt=self.prompt.to(device),
        )


def planted_decoder(
    *,
    V: int = 1024,
    width: int = 256,
    layers: int = 12,
    heads: int = 4,
    most: int = 512,
    encoder: EncoderConfig | None = None,
    seed: int = 0,
) -> PlantedDecoder:
    """An encoder-decoder model that says what frames of `planted_text` tell it.

    Args:
        V: tokens of the decoder.
        width: of the decoder, D.
        layers: of the decoder.
        heads: of its attention.
        most: tokens that it has positions for.
        encoder: of the model, whose weights stay random; None is a small one.
        seed: of all weights.

    Raises:
        ValueError: codes of this width cannot be kept apart.
    """
    # half of the width are signs: two of 12 ln V signs are alike in little more than half
    least = ceil(24 * math.log(max(V, most)))
    expect(width >= least, "width", f"at least {least} for V={V} and most={most}", width)
    config = AEDConfig(
        vocab_size=V,
        bos=BOS,
        eos=EOS,
        pad=PAD,
        encoder=encoder or ConvConfig(width=width),
        width=width,
        layers=layers,
        heads=heads,
        most=most,
        dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AEDModel(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(most, width // 2, generator=generator).sign()
    codes = torch.randn(V, width // 2, generator=generator).sign()
    _plant(model, places, codes, generator)
    return PlantedDecoder(model=model, places=places, codes=codes)


def planted_text(
    decoder: PlantedDecoder,
    B: int,
    T: int,
    *,
    prompt: int = 1,
    labels_per_second: float = 3.5,
    frames_per_second: float = 12.5,
    seed: int = 0,
) -> PlantedText:
    """A batch whose texts are known.

    Labels come in bursts with pauses between them, one on a frame at most, and eos follows. The
    default density is that of English in some thousand subwords.

    Args:
        decoder: which is to say the texts.
        B: utterances.
        T: frames of the longest; the others have T down to T / 2.
        prompt: tokens before the text, `bos` first.
        labels_per_second: how dense labels lie.
        frames_per_second: of the encoder.
        seed: of labels and frames.
    """
    assert 1 <= prompt <= decoder.model.most - T, "the model has no positions for such texts"
    V, half = decoder.codes.shape
    lengths = torch.linspace(T, T // 2, B).long()
    frames = []
    labels = []
    for b, length in enumerate(lengths.tolist()):
        density = labels_per_second / frames_per_second
        frames.append(_distinct(speech(length, density, (seed, b)), length - 1))
        draw = np.random.default_rng((seed, b, 1))
        steps = draw.integers(1, V - SPECIAL, size=len(frames[b]))  # no 0: neighbours differ
        labels.append((SPECIAL + steps.cumsum() % (V - SPECIAL)).tolist())
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SPECIAL, V, (prompt,), generator=generator)
    tokens[0] = BOS
    encoded = NOISE * torch.randn(B, T, 2 * half, generator=generator)
    for b, ends in enumerate(lengths.tolist()):
        places = torch.tensor([*frames[b], ends - 1])
        said = torch.tensor([*labels[b], EOS])
        asked = decoder.places[prompt - 1 : prompt - 1 + len(said)]
        encoded[b, places] += torch.cat([asked, decoder.codes[said]], 1)
    return PlantedText(
        model=decoder.model,
        encoded=encoded,
        lengths=lengths,
        prompt=tokens,
        labels=labels,
        frames=frames,
    )


def ctc_text(plan: PlantedText, errors: float = 0.0, seed: int = 0) -> Tensor:
    """What the CTC head of such a model would say of the same speech: log-probabilities
    (B, T, V + 1), a peak for each label.

    Args:
        plan: whose texts are said.
        errors: the share of labels that are heard as another one.
        seed: of errors and noise.
    """
    B, T, _ = plan.encoded.shape
    V = plan.model.vocab_size
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V + 1, generator=draw)
    logits[..., V] += 10.0
    for b, (labels, frames) in enumerate(zip(plan.labels, plan.frames, strict=True)):
        wrong = torch.rand(len(labels), generator=draw) < errors
        shifts = torch.randint(1, V - SPECIAL, (len(labels),), generator=draw) * wrong
        heard = SPECIAL + (torch.tensor(labels) - SPECIAL + shifts) % (V - SPECIAL)
        logits[b, frames, heard] += 20.0
    return logits.log_softmax(-1)


def _distinct(frames: list[int], end: int) -> list[int]:
    """Frames of labels, one on each, all before the frame `end`; what does not fit is left out."""
    places: list[int] = []
    last = -1
    for frame in frames:
        last = max(frame, last + 1)
        if last < end:
            places.append(last)
    return places


def _plant(model: AEDModel, places: Tensor, codes: Tensor, generator: torch.Generator) -> None:
    """Weights by which the first layer asks for the frame of its position, and the output reads
    codes.

    Args:
        model: is written.
        places: (most, D / 2) codes of positions.
        codes: (V, D / 2) codes of tokens.
        generator: of the noise.
    """
    D = model.config.width
    half = D // 2
    model.positions.copy_(torch.cat([places, torch.zeros_like(places)], 1))
    after_norm = VALUE * math.sqrt(2 / (1 + VALUE**2))  # a token's code in what the output reads
    model.embedding.weight.zero_()
    model.embedding.weight[:, half:] = codes * LOGIT / (half * after_norm)
    model.embedding.weight[PAD] = 0
    model.norm.weight[:half] = 0
    share = MURMUR / math.sqrt(3 * model.config.layers)
    for layer in model.stack():
        _quieten(layer, share, generator)
    _ask(model.stack()[0])


def _quieten(layer: DecoderLayer, share: float, generator: torch.Generator) -> None:
    """Sublayers that add about `share` to each channel, with biases that are not zero."""
    inputs: list[Any] = [layer.self_attention.qkv, layer.cross_attention.key_value]
    outputs: list[Any] = [layer.self_attention.out, layer.cross_attention.out]
    outputs.append(layer.feed_forward[2])
    for linear in inputs:
        linear.bias.normal_(0, NOISE, generator=generator)
    for linear in outputs:
        linear.weight.normal_(0, share / linear.in_features**0.5, generator=generator)
        linear.bias.normal_(0, share / 10, generator=generator)
    layer.self_attention.out.weight *= 3  # since it mixes tokens, which makes the values smaller


def _ask(layer: DecoderLayer) -> None:
    """Cross-attention that finds the frame of its position, and brings the code of its token.

    Every channel of a head stands for one of the position's channels in query and key, and for one
    of the token's in the value: row r for channel r modulo D / 2.
    """
    attention = layer.cross_attention
    D = attention.query.in_features
    half = D // 2
    signs = math.sqrt(D // attention.heads)  # a score is the sum of as many over their root
    query = attention.query.weight
    key, value = attention.key_value.weight.chunk(2)
    query.zero_()
    attention.query.bias.zero_()
    picks = torch.eye(half).repeat(2, 1)  # (D, D / 2)
    query[:, :half] = picks * ASK / (math.sqrt(2) * signs)  # the norm before makes 1 the root of 2
    for weight in (key, value):
        weight.zero_()
    key[:, :half] = picks
    value[:, half:] = picks
    attention.out.weight[half:] += VALUE / 2 * picks.T
