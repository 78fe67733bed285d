"""Encoder-decoder models in four ways of decoding: work counted, and times of small random models.

The models never write eos, so that the number of their steps is known; their texts mean nothing.
They decode noise, as an untrained encoder gives nearly the same frame throughout. Attention is made
sharp, so that a text depends on the frames and on all of its tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from asrkit.decoders import aed_greedy
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import state_tensors
from asrkit.models import AEDConfig, AEDModel, FastConformerConfig
from asrkit.shapes import expect
from asrkit.workbench import cost
from asrkit.workbench.bench.suites.decoders import Counting
from asrkit.workbench.lessons.encoder_decoder.counts import aed_flops
from asrkit.workbench.measure import Timing, measure, ratio

FRAMES_PER_S = 100  # of features; the encoder leaves an eighth of them


@dataclass(frozen=True)
class Way:
    """What decoding keeps: `cross` of the frames, `past` of the text so far."""

    cross: Literal["kept", "absorbed", "recomputed"]
    past: Literal["kept", "states", "none"]


WAYS = {
    "no cache": Way("recomputed", "none"),
    "NeMo 3.0": Way("recomputed", "states"),
    "K/V kept": Way("kept", "kept"),
    "absorbed": Way("absorbed", "kept"),
}
LAYERS = {"deep": (8, 6), "shallow": (11, 2)}  # of encoder and decoder; about equal parameters
VOCABULARY = 1024
SHARPER = 8.0  # queries of cross-attention than at the start of a training
LOUDER = 4.0  # what cross-attention adds
QUIETER = 0.1  # the last token itself; else it would be written again


def gigaflops(config: AEDConfig, way: Way, *, seconds: float, tokens: int) -> dict[str, float]:
    """GFLOP of one utterance by part: encoder, projections of frames, past again, steps.

    Args:
        config: Sizes of a model with a FastConformer.
        way: What decoding keeps.
        seconds: Of speech.
        tokens: That are written, eos included.
    """
    encoder = config.encoder
    if not isinstance(encoder, FastConformerConfig):
        got = type(encoder).__name__
        raise ValueError(f"config: expected a model with a FastConformer, got {got}.")
    frames = round(seconds * FRAMES_PER_S)
    counted = aed_flops(
        T=-(-frames // encoder.subsampling),
        U=tokens,
        D=config.width,
        layers=config.layers,
        V=config.vocab_size,
        heads=config.heads,
        cross=way.cross,
        past=way.past,
        expansion=config.expansion,
    )
    parts = {
        "encoder": cost.encoder_flops(encoder, B=1, T=frames),
        "projections of frames": counted.frames,
        "earlier tokens again": counted.again,
        "steps": counted.tokens + counted.output,
    }
    return {name: FLOP / 1e9 for name, FLOP in parts.items()}


def step_products(seconds: float) -> dict[str, int]:
    """Products of D x D weights in one step of one layer that projects the frames, by part.

    Args:
        seconds: Of speech, of which eight frames are encoded to one.

    >>> step_products(20)["projections of frames"]
    500
    """
    frames = round(seconds * FRAMES_PER_S / 8)
    token = {"self-attention": 4, "cross-attention": 2, "feed-forward": 8}
    return token | {"projections of frames": 2 * frames}


def random_model(layers: tuple[int, int], *, width: int = 256, seed: int = 0) -> AEDModel:
    """An encoder-decoder model with random weights that never writes eos, in inference mode.

    Args:
        layers: Of encoder and decoder.
        width: Of both; heads have 64.
        seed: Of the weights.
    """
    expect(width % 64 == 0, "width", "a multiple of 64", width)
    in_encoder, in_decoder = layers
    heads = width // 64
    encoder = FastConformerConfig(
        width=width, layers=in_encoder, heads=heads, subsampling_channels=64
    )
    config = AEDConfig(
        vocab_size=VOCABULARY,
        pad=VOCABULARY - 3,
        bos=VOCABULARY - 2,
        eos=VOCABULARY - 1,
        encoder=encoder,
        width=width,
        layers=in_decoder,
        heads=heads,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AEDModel(config).eval()
        _sharpen(model)
    return model


@torch.no_grad()
def _sharpen(model: AEDModel) -> None:
    """Weights by which a text depends on frames and tokens, and never ends."""
    bias, norm = model.output_bias, model.embedding_norm
    assert bias is not None, "a Canary's output has a bias"
    assert isinstance(norm, nn.LayerNorm), "a Canary's embedding has a norm"
    bias[model.eos] = -1e9
    norm.weight.mul_(QUIETER)
    for layer in model.stack():
        attention = layer.cross_attention
        attention.query.weight.mul_(SHARPER)
        attention.out.weight.mul_(LOUDER)
        torch.nn.init.normal_(attention.key_value.bias, std=0.3)


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Features that are noise, and texts of one length.

    Attributes:
        features: (B, T, F).
        lengths: (B,) int64.
        tokens: Steps of a text, eos included.
    """

    features: Tensor
    lengths: Tensor
    tokens: int


def noise(B: int, *, seconds: float, tokens: int, bins: int = 80, seed: int = 0) -> Speech:
    """A batch of noise, all utterances of one length.

    Args:
        B: Utterances.
        seconds: Of each.
        tokens: Steps that a text of it takes.
        bins: Of the features.
        seed: Of the noise.
    """
    frames = round(seconds * FRAMES_PER_S)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(B, frames, bins, generator=generator)
    return Speech(features=features, lengths=torch.full((B,), frames), tokens=tokens)


def noise_frames(model: AEDModel, speech: Speech, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise (B, T', D) of the shape of the encoder's frames, and their lengths (B,).

    Args:
        model: Whose frames.
        speech: To encode.
        seed: Of the noise.
    """
    encoder = model.config.encoder
    assert isinstance(encoder, FastConformerConfig)
    B, T, _ = speech.features.shape
    frames = -(-T // encoder.subsampling)
    generator = torch.Generator().manual_seed(seed)
    encoded = torch.randn(B, frames, model.config.width, generator=generator)
    lengths = -(-speech.lengths // encoder.subsampling)
    return encoded.to(model.embedding.weight.dtype), lengths


def decode(
    model: Any,
    encoded: Tensor,
    lengths: Tensor,
    way: Way,
    *,
    tokens: int,
    draft: Hypotheses | None = None,
) -> Hypotheses:
    """Greedy texts of so many steps.

    Args:
        model: That never writes eos.
        encoded: (B, T, D).
        lengths: (B,).
        way: What decoding keeps.
        tokens: Steps, of which the last one would write eos.
        draft: Of the texts.
    """
    return aed_greedy(
        model, encoded, lengths, cross=way.cross, past=way.past, most=tokens - 1, draft=draft
    )


def texts_agree(
    model: AEDModel, speech: Speech, ways: Mapping[str, Way] = WAYS, *, rows: int = 2
) -> bool:
    """Whether all ways write the same texts, in float64, where rounding decides nothing.

    Args:
        model: Copied.
        speech: Of which the first `rows` utterances count.
        ways: By name.
        rows: Utterances.
    """
    exact = deepcopy(model).double()
    encoded, lengths = noise_frames(exact, speech)
    texts = [
        decode(exact, encoded[:rows], lengths[:rows], way, tokens=speech.tokens).tokens()
        for way in ways.values()
    ]
    return all(text == texts[0] for text in texts)


def kept_MB(model: AEDModel, encoded: Tensor, lengths: Tensor, way: Way, *, tokens: int) -> float:
    """Megabytes that decoding holds between its steps, of frames and text, as allocated.

    Args:
        model: The model.
        encoded: (B, T, D).
        lengths: (B,).
        way: What decoding keeps.
        tokens: That there is room for.
    """
    with torch.inference_mode():
        memory = model.remember(encoded, lengths, cross=way.cross)
        state = model.begin(memory, tokens, past=way.past)
    # neither the mask of the frames nor the place in the text, which come first
    kept = state_tensors((memory[1:], state[1:]))
    return sum(part.nbytes for part in kept) / 1e6


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of several models in several ways, of one batch, from one run.

    Attributes:
        B: Utterances.
        seconds: Of speech in all.
        tokens: Steps of the texts.
        timings: Of "MODEL, encoder", "MODEL, projections" and "MODEL, WAY".
    """

    B: int
    seconds: float
    tokens: int
    timings: Mapping[str, Timing]

    def parts_ms(self, model: str, name: str, way: Way) -> dict[str, float]:
        """Milliseconds of encoder, projections of frames, and the rest of the steps.

        Projections are timed alone, for all layers at once, and counted for each step that computes
        them; the rest is what remains of the decoder's time.

        Args:
            model: Name of the model.
            name: Of the way.
            way: What it keeps.
        """
        once = self.timings[f"{model}, projections"].median_ms
        times = {"kept": 1, "absorbed": 0, "recomputed": self.tokens}[way.cross]
        decoding = self.timings[f"{model}, {name}"].median_ms
        projecting = min(once * times, decoding)
        return {
            "encoder": self.timings[f"{model}, encoder"].median_ms,
            "projections of frames": projecting,
            "rest of the steps": decoding - projecting,
        }

    def whole_ms(self, model: str, name: str) -> np.ndarray:
        """Milliseconds of encoder and decoder together, one for each repeat."""
        encoder = np.array(self.timings[f"{model}, encoder"].samples_ms)
        return encoder + np.array(self.timings[f"{model}, {name}"].samples_ms)

    def decoder_share(self, model: str, name: str) -> float:
        """Median share of the decoder in the whole time."""
        decoder = np.array(self.timings[f"{model}, {name}"].samples_ms)
        return float(np.median(decoder / self.whole_ms(model, name)))

    def gain(self, name: str, slow: str = "deep", fast: str = "shallow") -> np.ndarray:
        """How many times as long one model takes as the other, one for each repeat."""
        return self.whole_ms(slow, name) / self.whole_ms(fast, name)

    def rtfx(self, model: str, name: str) -> float:
        """Median seconds of speech in a second."""
        return float(np.median(1e3 * self.seconds / self.whole_ms(model, name)))


def time_ways(
    models: Mapping[str, AEDModel],
    speech: Speech,
    *,
    ways: Mapping[str, Way] = WAYS,
    repeats: int = 3,
) -> Times:
    """Times of encoders, projections and ways of decoding, interleaved.

    Args:
        models: By name.
        speech: What all of them recognise.
        ways: By name.
        repeats: Of each.
    """
    arms: dict[str, Callable[[], object]] = {}
    for title, model in models.items():
        encoded, lengths = noise_frames(model, speech)
        arms[f"{title}, encoder"] = partial(_encode, model, speech)
        arms[f"{title}, projections"] = partial(_project, model, encoded, lengths)
        for name, way in ways.items():
            arms[f"{title}, {name}"] = partial(
                decode, model, encoded, lengths, way, tokens=speech.tokens
            )
    B, frames, _ = speech.features.shape
    return Times(
        B=B,
        seconds=B * frames / FRAMES_PER_S,
        tokens=speech.tokens,
        timings=measure(arms, repeats=repeats, warmup=1),
    )


def _encode(model: AEDModel, speech: Speech) -> object:
    with torch.inference_mode():
        return model.encode(speech.features, speech.lengths)


def _project(model: AEDModel, encoded: Tensor, lengths: Tensor) -> object:
    """Keys and values of all frames, for every layer once."""
    with torch.inference_mode():
        return model.remember(encoded, lengths, cross="kept")


@dataclass(frozen=True, kw_only=True)
class DraftRun:
    """Decoding with a draft of known errors.

    Attributes:
        rate: Chance that a token of the draft is wrong; None without a draft.
        accepted: Tokens before the first error, of each utterance.
        calls: Of the decoder.
        same: Whether the text is the one without a draft.
        speedups: Times as fast as without a draft, one for each repeat.
    """

    rate: float | None
    accepted: tuple[int, ...]
    calls: int
    same: bool
    speedups: tuple[float, ...]


def time_drafts(
    model: AEDModel, speech: Speech, rates: Sequence[float], *, repeats: int = 3, seed: int = 0
) -> list[DraftRun]:
    """Decoding without a draft, and with drafts of each rate of errors; K/V are kept.

    Texts and calls are those in float64, where rounding decides nothing; times are in float32.

    Args:
        model: That never writes eos.
        speech: What is recognised.
        rates: Chances that a token is wrong.
        repeats: Of each.
        seed: Of the errors.
    """
    way = WAYS["K/V kept"]
    tokens = speech.tokens
    encoded, lengths = noise_frames(model, speech)
    exact = deepcopy(model).double()
    plain = decode(exact, encoded.double(), lengths, way, tokens=tokens)
    generator = np.random.default_rng(seed)
    drafts: dict[float | None, Hypotheses | None] = {None: None}
    for rate in rates:
        drafts[rate] = spoiled(plain, rate, generator)
    arms = {
        str(rate): partial(decode, model, encoded, lengths, way, tokens=tokens, draft=draft)
        for rate, draft in drafts.items()
    }
    timings = measure(arms, repeats=repeats, warmup=1)
    runs = []
    for errors, draft in drafts.items():
        counted = Counting(exact)
        found = decode(counted, encoded.double(), lengths, way, tokens=tokens, draft=draft)
        runs.append(
            DraftRun(
                rate=errors,
                accepted=tuple(right_beginnings(plain, draft)),
                calls=counted.calls["follow"],
                same=found.tokens() == plain.tokens(),
                speedups=ratio(timings, "None", str(errors)),
            )
        )
    return runs


def spoiled(text: Hypotheses, rate: float, generator: np.random.Generator) -> Hypotheses:
    """The texts as a draft in which each token is another one with a chance of `rate`.

    Args:
        text: What is right.
        rate: From 0 to 1.
        generator: Of random numbers.
    """
    expect(0 <= rate <= 1, "rate", "a chance from 0 to 1", rate)
    rows = []
    for row in text.tokens():
        wrong = generator.random(len(row)) < rate
        # the special tokens are the last three
        others = [(token + 1) % (VOCABULARY - 3) for token in row]
        guessed = [b if bad else a for a, b, bad in zip(row, others, wrong, strict=True)]
        rows.append([(token, -1, 0) for token in guessed])
    return Hypotheses.from_lists(rows, [torch.zeros(())] * len(rows), "a draft with errors")


def right_beginnings(text: Hypotheses, draft: Hypotheses | None) -> list[int]:
    """Tokens of each draft before its first error; none without a draft."""
    rows = text.tokens()
    if draft is None:
        return [0] * len(rows)
    counts = []
    for row, guess in zip(rows, draft.tokens(), strict=True):
        right = np.cumprod([one == other for one, other in zip(row, guess, strict=True)])
        counts.append(int(right.sum()))
    return counts
