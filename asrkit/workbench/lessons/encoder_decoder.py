"""What notebook 09_encoder_decoder counts, measures and draws beyond its cells.

Counts are of `asrkit.models.AEDModel`'s decoder, in the ways of `workbench.bench.attention_ways`.

The models that are timed are small and random, and never write eos, so that the number of their
steps is known; their texts mean nothing. They decode noise, as an untrained encoder gives nearly
the same frame throughout. Attention is made sharp, so that a text depends on the frames and on all
of its tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from asrkit.decoders import aed_greedy
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import state_tensors
from asrkit.models import AEDConfig, AEDModel, FastConformerConfig
from asrkit.workbench.bench.attention_ways import WAYS, Way, in_a_way
from asrkit.workbench.bench.suites.decoders import Counting
from asrkit.workbench.cost import encoder_flops
from asrkit.workbench.measure import Timing, measure, ratio
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


def aed_flops(config: AEDConfig, way: tuple[str, str], *, T: int, U: int) -> dict[str, int]:
    """Operations of the products of greedy decoding of an utterance, by part; U tokens, U steps.

    A multiplication and its addition are two. Norms, activations and softmax are left out.

    Args:
        config: Sizes of the decoder.
        way: `Way` of decoding.
        T: Encoder frames, padding included.
        U: Tokens that are written, eos included.

    Returns:
        Projections of frames to keys and values; tokens of earlier steps, computed again; and what
        each new token takes in the layers and the output.

    >>> from asrkit.models import presets
    >>> sum(aed_flops(presets.canary_1b(), WAYS["NeMo 3.0"], T=250, U=70).values()) // 10**9
    2056
    """
    cross, past = way
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


class DecoderBytes(NamedTuple):
    """Bytes of an attention decoder: what is kept between steps, and what one step reads.

    Attributes:
        frames: Kept of the encoder's frames.
        past: Kept of the text, with room for U tokens.
        weights_read: Weights that a step reads, whatever the batch.
        frames_read: What a step reads for the frames; projections of "recomputed" are written and
            read as well.
        past_read: What the last step reads for the text, likewise.
    """

    frames: int
    past: int
    weights_read: int
    frames_read: int
    past_read: int


def aed_bytes(
    config: AEDConfig, way: tuple[str, str], *, B: int, T: int, U: int, itemsize: int = 2
) -> DecoderBytes:
    """Bytes that greedy decoding keeps, and that a step of one token an utterance reads.

    A step is counted as if no cache held anything from one layer or step to the next, without
    the vectors between its products, and without biases and norms. Absorbed frames are read twice
    a layer, as many bytes as keys and values; being the same in all layers, they may come from a
    cache.

    Args:
        config: Sizes of the decoder.
        way: `Way` of decoding.
        B: Utterances.
        T: Encoder frames of each, padding included.
        U: Tokens that there is room for, prompt included.
        itemsize: Bytes of a number, 2 for half precision, 4 for float32.

    >>> from asrkit.models import presets
    >>> kept = aed_bytes(presets.canary_1b(), WAYS["K/V kept"], B=128, T=250, U=70)
    >>> kept.frames / 1e9, kept.weights_read / 1e9  # 128 times 20 seconds
    (3.145728, 0.713097216)
    """
    cross, past = way
    D = config.width
    layers = config.layers
    frames = itemsize * B * T * D
    text = itemsize * B * U * D
    weights = 6 + 2 * config.expansion  # self-attention 4, query and output 2, feed-forward
    if cross != "kept":
        weights += 2
    # frames, then keys and values written and read; "none" keeps and reads tokens of 8 bytes
    frames_kept = {"kept": 2 * layers, "absorbed": 1, "recomputed": 1}
    frames_read = {"kept": 2, "absorbed": 2, "recomputed": 5}
    past_kept = {"kept": 2, "states": 1, "none": 0}
    past_read = {"kept": 2, "states": 5, "none": 4}
    tokens = 8 * B * U if past == "none" else 0
    return DecoderBytes(
        frames=frames_kept[cross] * frames,
        past=past_kept[past] * layers * text + tokens,
        weights_read=itemsize * (layers * weights * D * D + config.vocab_size * D),
        frames_read=frames_read[cross] * layers * frames,
        past_read=past_read[past] * layers * text + tokens,
    )


def gigaflops(config: AEDConfig, way: Way, *, seconds: float, tokens: int) -> dict[str, float]:
    """GFLOP of one utterance by part: encoder, projections of frames, past again, steps.

    Args:
        config: Sizes of a model with a FastConformer.
        way: What decoding keeps.
        seconds: Of speech, with 100 frames of features each.
        tokens: That are written, eos included.
    """
    encoder: Any = config.encoder
    frames = round(100 * seconds)
    parts = {"encoder": encoder_flops(encoder, B=1, T=frames)}
    parts |= aed_flops(config, way, T=-(-frames // encoder.subsampling), U=tokens)
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


def decode(model: Any, speech: Speech, way: Way, draft: Hypotheses | None = None) -> Hypotheses:
    """Greedy texts of `speech.tokens` steps, of which the last one would write eos."""
    encoded = speech.encoded.to(model.embedding.weight.dtype)
    _, lengths = speech.lengths
    kept = in_a_way(model, way)
    return aed_greedy(kept, encoded, lengths, most=speech.tokens - 1, draft=draft)


def texts_agree(model: AEDModel, speech: Speech) -> bool:
    """Whether all ways write the same texts, in float64, where rounding decides nothing."""
    exact = deepcopy(model).double()
    first, *others = (decode(exact, speech, way).tokens() for way in WAYS.values())
    return all(text == first for text in others)


def kept_MB(model: AEDModel, speech: Speech, way: Way) -> float:
    """Megabytes that decoding holds between its steps, of frames and text, as allocated."""
    _, lengths = speech.lengths
    kept_model = in_a_way(model, way)
    with torch.inference_mode():
        memory = kept_model.remember(speech.encoded, lengths)
        state = kept_model.begin(memory, speech.tokens)
    # neither the mask of the frames nor the place in the text, which come first
    kept = state_tensors((memory[1:], state[1:]))
    return sum(part.nbytes for part in kept) / 1e6


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of several models in several ways, of one batch, from one run.

    Attributes:
        seconds: Of speech in all.
        tokens: Steps of the texts.
        timings: Of "MODEL, encoder", "MODEL, projections" and "MODEL, WAY".
    """

    seconds: float
    tokens: int
    timings: Mapping[str, Timing]

    def parts_ms(self, model: str, name: str) -> dict[str, float]:
        """Milliseconds of encoder, projections of frames, and the rest of the steps.

        Projections are timed alone, for all layers at once, and counted for each step that computes
        them; the rest is what remains of the decoder's time.
        """
        times = {"kept": 1, "absorbed": 0, "recomputed": self.tokens}[WAYS[name].cross]
        decoding = self.timings[f"{model}, {name}"].median_ms
        projecting = min(times * self.timings[f"{model}, projections"].median_ms, decoding)
        return {
            "encoder": self.timings[f"{model}, encoder"].median_ms,
            "projections of frames": projecting,
            "rest of the steps": decoding - projecting,
        }

    def decoder_ms(self, model: str, name: str) -> np.ndarray:
        """Milliseconds of the decoder, one for each repeat."""
        return np.array(self.timings[f"{model}, {name}"].samples_ms)

    def whole_ms(self, model: str, name: str) -> np.ndarray:
        """Milliseconds of encoder and decoder together, one for each repeat."""
        return self.decoder_ms(model, "encoder") + self.decoder_ms(model, name)

    def gain(self, name: str) -> np.ndarray:
        """How many times as long the deep model takes as the shallow one, for each repeat."""
        return self.whole_ms("deep", name) / self.whole_ms("shallow", name)


def time_ways(models: Mapping[str, AEDModel], speech: Speech, *, repeats: int) -> Times:
    """Times of encoders, projections and ways of decoding, interleaved."""
    arms: dict[str, Callable[[], object]] = {}
    feature_lengths, lengths = speech.lengths
    for title, model in models.items():
        encode = torch.inference_mode()(model.encode)
        project = torch.inference_mode()(model.remember)
        arms[f"{title}, encoder"] = partial(encode, speech.features, feature_lengths)
        arms[f"{title}, projections"] = partial(project, speech.encoded, lengths)
        for name, way in WAYS.items():
            arms[f"{title}, {name}"] = partial(decode, model, speech, way)
    timings = measure(arms, repeats=repeats, warmup=1)
    return Times(seconds=speech.seconds, tokens=speech.tokens, timings=timings)


class DraftRun(NamedTuple):
    """Decoding with a draft of known errors.

    Attributes:
        rate: Chance that a token of the draft is wrong; None without a draft.
        calls: Of the decoder.
        same: Whether the text is the one without a draft.
        speedups: Times as fast as without a draft, one for each repeat.
    """

    rate: float | None
    calls: int
    same: bool
    speedups: tuple[float, ...]


def time_drafts(
    model: AEDModel, speech: Speech, rates: Sequence[float], *, repeats: int, seed: int = 0
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
    exact = deepcopy(model).double()
    plain = decode(exact, speech, way)
    random = np.random.default_rng(seed)
    drafts: dict[float | None, Hypotheses | None] = {None: None}
    for rate in rates:
        drafts[rate] = spoiled(plain, rate, random)
    arms = {str(rate): partial(decode, model, speech, way, draft) for rate, draft in drafts.items()}
    timings = measure(arms, repeats=repeats, warmup=1)
    runs = []
    for wrong, draft in drafts.items():
        counted = Counting(exact)
        same = decode(counted, speech, way, draft).tokens() == plain.tokens()
        calls = counted.calls["follow"]
        runs.append(DraftRun(wrong, calls, same, ratio(timings, "None", str(wrong))))
    return runs


def spoiled(text: Hypotheses, rate: float, random: np.random.Generator) -> Hypotheses:
    """The texts as a draft in which each token is another one with a chance of `rate`."""
    rows = []
    for row in text.tokens():
        wrong = random.random(len(row)) < rate
        # the special tokens are the last three
        guessed = np.where(wrong, (np.array(row) + 1) % (VOCABULARY - 3), row)
        rows.append([(token, -1, 0) for token in guessed.tolist()])
    return Hypotheses.from_lists(rows, [torch.zeros(())] * len(rows), "a draft with errors")


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
    """Work or time by part, a bar for each way of decoding, an Axes for each model, on one scale.

    Args:
        models: Name of a model -> name of a way -> part -> size.
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
