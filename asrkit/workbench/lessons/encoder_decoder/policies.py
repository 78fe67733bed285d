"""Cache policies of a decoder: what they compute, how long that takes, and pictures of both.

Counts are of `asrkit.models.AEDModel`'s decoder, with the policies of
`workbench.bench.cache_policies`.

The models that are timed are small and random, and never write eos, so that the number of their
steps is known; their texts mean nothing. They decode noise, as an untrained encoder gives nearly
the same frame throughout. Attention is made sharp, so that a text depends on the frames and on all
of its tokens.
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
from asrkit.workbench.bench.cache_policies import POLICIES, CachePolicy, with_policy
from asrkit.workbench.cost import encoder_flops
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.marks import stacked
from asrkit.workbench.plots.palette import colours_of

LAYERS = {"deep": (8, 6), "shallow": (11, 2)}  # of encoder and decoder; about equal parameters
VOCABULARY = 1024
SHARPER = 8.0  # queries of cross-attention than at the start of a training
LOUDER = 4.0  # what cross-attention adds
QUIETER = 0.1  # the last token itself; else it would be written again
CELLS_A_ROW = 50  # of the picture of a step


# Counts


def aed_flops(config: AEDConfig, policy: tuple[str, str], *, T: int, U: int) -> dict[str, int]:
    """Operations of the products of greedy decoding of an utterance, by part; U tokens, U steps.

    A multiplication and its addition are two. Norms, activations and softmax are left out.

    Args:
        config: Sizes of the decoder.
        policy: `CachePolicy` of decoding.
        T: Encoder frames, padding included.
        U: Tokens that are written, eos included.

    Returns:
        Projections of frames to keys and values; tokens of earlier steps, computed again; and what
        each new token takes in the layers and the output.

    >>> from asrkit.models import presets
    >>> sum(aed_flops(presets.canary_1b(), POLICIES["NeMo 3.0"], T=250, U=70).values()) // 10**9
    2056
    """
    cross, past = policy
    D = config.width
    products = 6 + 2 * config.expansion  # self-attention 4, query and output 2, feed-forward
    looks = 1
    if cross == "absorbed":
        products += 2  # the weights of key and value
        looks = config.heads  # each head's query is as wide as a frame
    projections = {"kept": 1, "absorbed": 0, "recomputed": U}[cross]  # of all frames
    again = 0
    tokens = 0
    for earlier in range(U):
        attention = 2 * (earlier + 1) * D + 2 * looks * T * D
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
        policy: What decoding keeps.
        seconds: Of speech, with 100 frames of features each.
        tokens: That are written, eos included.
    """
    encoder: Any = config.encoder
    frames = round(100 * seconds)
    parts = {"encoder": encoder_flops(encoder, B=1, T=frames)}
    parts |= aed_flops(config, policy, T=-(-frames // encoder.subsampling), U=tokens)
    return {name: FLOP / 1e9 for name, FLOP in parts.items()}


# Models that are timed


def random_model(layers: tuple[int, int], *, heads: int = 4, seed: int = 0) -> AEDModel:
    """An encoder-decoder model with random weights that never writes eos, in inference mode.

    Args:
        layers: Of encoder and decoder.
        heads: Of both, each of 64.
        seed: Of the weights.
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
        model.embedding_norm.weight.mul_(QUIETER)
        for layer in model.layers:
            attention = layer.cross_attention
            attention.query.weight.mul_(SHARPER)
            attention.out.weight.mul_(LOUDER)
            torch.nn.init.normal_(attention.key_value.bias, std=0.3)
    return model


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Noise in place of speech, and texts of one length.

    Attributes:
        features: (B, T, F).
        encoded: (B, T', D), what the decoder gets for the encoder's frames.
        tokens: Steps of a text, eos included.
    """

    features: Tensor
    encoded: Tensor
    tokens: int

    @property
    def seconds(self) -> float:
        """Of all utterances."""
        B, T, _ = self.features.shape
        return B * T / 100

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Frames of each utterance, of the features and of the encoder: all are of one length."""
        B, T, _ = self.features.shape
        return torch.full((B,), T), torch.full((B,), self.encoded.shape[1])


def noise(B: int, *, width: int, seconds: float, tokens: int, seed: int = 0) -> Speech:
    """A batch of noise, all utterances of one length.

    Args:
        B: Utterances.
        width: Of the model.
        seconds: Of each.
        tokens: Steps that a text of it takes.
        seed: Of the noise.
    """
    T = round(100 * seconds)
    features, encoded = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for shape in ((B, T, 80), (B, -(-T // 8), width))
    )
    return Speech(features=features, encoded=encoded, tokens=tokens)


def decode(model: Any, speech: Speech, policy: CachePolicy) -> Hypotheses:
    """Greedy texts of `speech.tokens` steps, of which the last one would write eos."""
    encoded = speech.encoded.to(model.embedding.weight.dtype)
    _, lengths = speech.lengths
    kept = with_policy(model, policy)
    return aed_greedy(kept, encoded, lengths, max_labels=speech.tokens - 1)


def texts_agree(model: AEDModel, speech: Speech) -> bool:
    """Whether all policies write the same texts, in float64, where rounding decides nothing."""
    exact = deepcopy(model).double()
    first, *others = (decode(exact, speech, policy).tokens() for policy in POLICIES.values())
    return all(text == first for text in others)


def kept_MB(model: AEDModel, speech: Speech, policy: CachePolicy) -> float:
    """Megabytes that decoding holds between its steps, of frames and text, as allocated."""
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
    """Times of several models with several cache policies, of one batch, from one run.

    Attributes:
        seconds: Of speech in all.
        tokens: Steps of the texts.
        timings: Of "MODEL, encoder", "MODEL, projections" and "MODEL, POLICY".
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

        Together they are the median of `whole_ms`. Projections are timed alone, for all layers at
        once, and counted for each step that computes them; the rest is what remains of the
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
        """How many times as long one (model, policy) takes as another, encoder included.

        Returns:
            The least ratio of a repeat; the ratio of the medians, which `parts_ms` add up to; and
            the largest ratio of a repeat.
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
    """The products of one step of one layer as cells, a cell for each D x D product.

    Args:
        parts: Name of a part -> its cells.
        ax: Axes to draw on.
        rows: Rows that there is room for, so that two pictures have one scale.
    """
    start = 0
    for name, shade in colours_of(parts).items():
        cells = np.arange(start, start + parts[name])
        place = cells % CELLS_A_ROW, cells // CELLS_A_ROW
        ax.scatter(*place, s=50, marker="s", lw=0, color=shade, label=f"{name}: {parts[name]}")
        start += parts[name]
    ax.set(xlim=(-1, CELLS_A_ROW), ylim=(rows, -1), aspect="equal")
    ax.axis("off")
    ax.legend(**LEGEND_BESIDE)


def decoder_work(
    models: Mapping[str, Mapping[str, Mapping[str, float]]], axes: Sequence[Axes], *, unit: str
) -> None:
    """Work or time by part, a bar for each cache policy, an Axes for each model, on one scale.

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
