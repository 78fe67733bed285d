"""Cache policies of a decoder: their operations, their times, and pictures of both.

Counts are of `asrkit.models.AEDModel`'s decoder, with the policies of
`lessons.shared.cache_policies`.

The timed models are small and random, and never emit eos, so that the number of steps is known;
their texts have no meaning. They decode noise, because the frames of an untrained encoder are
nearly all the same. Attention is made sharp, so that a text depends on the frames and on all of its
tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from asrkit.decoders import aed_greedy
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import state_tensors
from asrkit.models import AEDConfig, AEDModel, FastConformerConfig
from asrkit.workbench.cost import encoder_flops
from asrkit.workbench.lessons.shared.cache_policies import POLICIES, CachePolicy, with_policy
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.marks import stacked
from asrkit.workbench.plots.palette import colours_of

LAYERS = {"deep": (8, 6), "shallow": (11, 2)}  # encoder and decoder; about equal parameters
VOCABULARY = 1024
QUERY_SCALE = 8.0  # sharpens cross-attention
CROSS_ATTENTION_SCALE = 4.0
EMBEDDING_SCALE = 0.1  # without it, the last token would be repeated
CELLS_PER_ROW = 50  # in the picture of a step


# Counts


def aed_flops(config: AEDConfig, policy: tuple[str, str], *, T: int, U: int) -> dict[str, int]:
    """Operations of the products of greedy decoding of an utterance, by part, for U steps.

    A multiplication and an addition are two operations. Norms, activations and softmax are left
    out.

    Args:
        config: Sizes of the decoder.
        policy: The `CachePolicy`.
        T: Number of encoder frames, padding included.
        U: Number of tokens, eos included.

    Returns:
        Operations of the projections of frames to keys and values, of earlier tokens that are
        computed again, and of the steps themselves in the layers and the output.

    >>> from asrkit.models import presets
    >>> sum(aed_flops(presets.canary_1b(), POLICIES["NeMo 3.0"], T=250, U=70).values()) // 10**9
    2056
    """
    cross, past = policy
    D = config.width
    products = 6 + 2 * config.expansion  # self-attention 4, query and output 2, feed-forward
    attended = 1
    if cross == "absorbed":
        products += 2  # the weights of key and value
        attended = config.heads  # each head's query is as wide as a frame
    projections = {"kept": 1, "absorbed": 0, "recomputed": U}[cross]  # of all frames
    again = 0
    tokens = 0
    for earlier in range(U):
        attention = 2 * (earlier + 1) * D + 2 * attended * T * D
        token = products * D * D + attention
        tokens += token
        again += earlier * {"kept": 0, "states": 2 * D * D, "none": token}[past]
    return {
        "projections of frames": 2 * config.layers * projections * 2 * T * D * D,
        "earlier tokens again": 2 * config.layers * again,
        "steps": 2 * config.layers * tokens + 2 * U * config.vocab_size * D,
    }


def gigaflops(
    config: AEDConfig, policy: CachePolicy, *, seconds: float, tokens: int
) -> dict[str, float]:
    """GFLOP of one utterance by part: encoder, projections of frames, past again, steps.

    Args:
        config: Sizes of a model with a FastConformer.
        policy: The cache policy.
        seconds: Seconds of speech, with 100 feature frames each.
        tokens: Number of tokens, eos included.
    """
    encoder: Any = config.encoder
    frames = round(100 * seconds)
    parts = {"encoder": encoder_flops(encoder, B=1, T=frames)}
    parts |= aed_flops(config, policy, T=-(-frames // encoder.subsampling), U=tokens)
    return {name: FLOP / 1e9 for name, FLOP in parts.items()}


# Models that are timed


def random_model(layers: tuple[int, int], *, heads: int = 4, seed: int = 0) -> AEDModel:
    """An encoder-decoder model with random weights that never emits eos, in eval mode.

    Args:
        layers: Number of layers of encoder and decoder.
        heads: Number of heads of both, each of width 64.
        seed: Seed of the weights.
    """
    in_encoder, in_decoder = layers
    width = 64 * heads
    config = AEDConfig(
        vocab_size=VOCABULARY,
        pad=VOCABULARY - 3,
        bos=VOCABULARY - 2,
        eos=VOCABULARY - 1,
        encoder=FastConformerConfig(
            width=width, layers=in_encoder, heads=heads, subsampling_channels=64
        ),
        width=width,
        layers=in_decoder,
        heads=heads,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = AEDModel(config).eval()
        model.output_bias[model.eos] = -1e9
        model.embedding_norm.weight.mul_(EMBEDDING_SCALE)
        for layer in model.layers:
            attention = layer.cross_attention
            attention.query.weight.mul_(QUERY_SCALE)
            attention.out.weight.mul_(CROSS_ATTENTION_SCALE)
            torch.nn.init.normal_(attention.key_value.bias, std=0.3)
    return model


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Noise in place of speech, with texts of one length.

    Attributes:
        features: Input of the encoder, (B, T, F).
        encoded: Input of the decoder, (B, T', D).
        tokens: Steps of a text, eos included.
    """

    features: Tensor
    encoded: Tensor
    tokens: int

    @property
    def seconds(self) -> float:
        """Seconds of all utterances together."""
        B, T, _ = self.features.shape
        return B * T / 100

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Feature frames and encoder frames of each utterance; all have full length."""
        B, T, _ = self.features.shape
        return torch.full((B,), T), torch.full((B,), self.encoded.shape[1])


def noise(B: int, *, width: int, seconds: float, tokens: int, seed: int = 0) -> Speech:
    """A batch of noise, all utterances of one length.

    Args:
        B: Number of utterances.
        width: Width of the model.
        seconds: Length of each utterance.
        tokens: Steps of a text.
        seed: Seed of the noise.
    """
    T = round(100 * seconds)
    features, encoded = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for shape in ((B, T, 80), (B, -(-T // 8), width))
    )
    return Speech(features=features, encoded=encoded, tokens=tokens)


def decode(model: Any, speech: Speech, policy: CachePolicy) -> Hypotheses:
    """Greedy texts of `speech.tokens` steps; the last step stands for eos."""
    encoded = speech.encoded.to(model.embedding.weight.dtype)
    _, lengths = speech.lengths
    kept = with_policy(model, policy)
    return aed_greedy(kept, encoded, lengths, max_labels=speech.tokens - 1)


def texts_agree(model: AEDModel, speech: Speech) -> bool:
    """Whether all policies give the same texts in float64, where rounding does not matter."""
    exact = deepcopy(model).double()
    first, *others = (decode(exact, speech, policy).tokens() for policy in POLICIES.values())
    return all(text == first for text in others)


def kept_MB(model: AEDModel, speech: Speech, policy: CachePolicy) -> float:
    """Allocated megabytes that decoding keeps between steps, for frames and text."""
    _, lengths = speech.lengths
    kept_model = with_policy(model, policy)
    with torch.inference_mode():
        memory = kept_model.prefill(speech.encoded, lengths)
        state = kept_model.init_state(memory, speech.tokens)
    # neither the mask of the frames nor the place in the text, which come first
    kept = state_tensors((memory[1:], state[1:]))
    return sum(part.nbytes for part in kept) / 1e6


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of several models with several cache policies, for one batch and from one run.

    Attributes:
        seconds: Seconds of speech in the batch.
        tokens: Steps of the texts.
        timings: Timings of "MODEL, encoder", "MODEL, projections" and "MODEL, POLICY".
    """

    seconds: float
    tokens: int
    timings: Mapping[str, Timing]

    def decoder_ms(self, model: str, name: str) -> np.ndarray:
        """Milliseconds of the decoder, one for each repeat."""
        return np.array(self.timings[f"{model}, {name}"].samples_ms)

    def whole_ms(self, model: str, name: str) -> np.ndarray:
        """Milliseconds of encoder and decoder together, one for each repeat."""
        return self.decoder_ms(model, "encoder") + self.decoder_ms(model, name)

    def parts_ms(self, model: str, name: str) -> dict[str, float]:
        """Milliseconds of encoder, projections of frames, and the rest of the steps.

        Their sum is the median of `whole_ms`. Projections are timed separately, for all layers
        together, and counted for each step that computes them; the rest is the remainder of the
        decoder's time.
        """
        times = {"kept": 1, "absorbed": 0, "recomputed": self.tokens}[POLICIES[name].cross]
        decoding = float(np.median(self.decoder_ms(model, name)))
        projecting = min(times * self.timings[f"{model}, projections"].median_ms, decoding)
        return {
            "encoder": float(np.median(self.whole_ms(model, name))) - decoding,
            "projections of frames": projecting,
            "rest of the steps": decoding - projecting,
        }

    def ratio(self, slow: tuple[str, str], fast: tuple[str, str]) -> tuple[float, float, float]:
        """Time of one (model, policy) over that of another, encoder included.

        Returns:
            The smallest ratio of a repeat, the ratio of the medians, and the largest ratio of a
            repeat. `parts_ms` add up to the medians.
        """
        slow_ms, fast_ms = self.whole_ms(*slow), self.whole_ms(*fast)
        each = slow_ms / fast_ms
        medians = np.median(slow_ms) / np.median(fast_ms)
        return float(each.min()), float(medians), float(each.max())


def time_policies(models: Mapping[str, AEDModel], speech: Speech, *, repeats: int) -> Times:
    """Times of encoders, projections and decoding with each policy, interleaved."""
    arms: dict[str, Callable[[], object]] = {}
    feature_lengths, lengths = speech.lengths
    for title, model in models.items():
        encode = torch.inference_mode()(model.encode)
        project = torch.inference_mode()(model.prefill)
        arms[f"{title}, encoder"] = partial(encode, speech.features, feature_lengths)
        arms[f"{title}, projections"] = partial(project, speech.encoded, lengths)
        for name, policy in POLICIES.items():
            arms[f"{title}, {name}"] = partial(decode, model, speech, policy)
    timings = measure(arms, repeats=repeats, warmup=1)
    return Times(seconds=speech.seconds, tokens=speech.tokens, timings=timings)


# Pictures


def step_cells(parts: Mapping[str, int], ax: Axes, *, rows: int) -> None:
    """Draw the products of one step of one layer, with a cell for each D x D product.

    Args:
        parts: Name of a part -> its number of cells.
        ax: Axes to draw on.
        rows: Number of rows that fit, so that two pictures have one scale.
    """
    start = 0
    for name, shade in colours_of(parts).items():
        cells = np.arange(start, start + parts[name])
        position = cells % CELLS_PER_ROW, cells // CELLS_PER_ROW
        ax.scatter(*position, s=50, marker="s", lw=0, color=shade, label=f"{name}: {parts[name]}")
        start += parts[name]
    ax.set(xlim=(-1, CELLS_PER_ROW), ylim=(rows, -1), aspect="equal")
    ax.axis("off")
    ax.legend(**LEGEND_BESIDE)


def decoder_work(
    models: Mapping[str, Mapping[str, Mapping[str, float]]], axes: Sequence[Axes], *, unit: str
) -> None:
    """Draw work or time by part: a bar for each cache policy, an Axes for each model, one scale.

    Args:
        models: Name of a model -> name of a policy -> part -> size.
        axes: One for each model.
        unit: Quantity and unit of all sizes.
    """
    most = max(sum(parts.values()) for rows in models.values() for parts in rows.values())
    for (name, rows), ax in zip(models.items(), axes, strict=True):
        stacked(rows, ax, unit=unit)
        ax.set_title(name, fontsize=10)
        ax.set_xlim(0, 1.12 * most)
        ax.xaxis.set_major_formatter("{x:,g}")
        bars: Any = ax.containers[-1]
        ax.bar_label(
            bars, [f"{sum(parts.values()):,.0f}" for parts in rows.values()], fontsize=8, padding=3
        )
        if ax is not axes[-1]:
            ax.legend().remove()
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)
