"""Models that emit planted labels, so that the density of labels, which determines the speed of
decoding, is chosen.

Random weights emit far too many labels or none, and a trained model has one density only. Here real
models get weights that follow the frames, and frames that encode the labels as random vectors of
signs ("codes").

In a `TransducerModel`, label n of an utterance comes from class n modulo 3 of the vocabulary, so
the class of the last label tells the position. The hidden layer of the joint has a block of units
per class. The prediction raises the block of the last label's class above the threshold of the
relu. In this block the frame holds the code of the next label, and the output layer's rows are
these codes. If the block is empty, blank wins. The embedding of blank is zero, as in NeMo.

In an `AEDModel`, half of the channels hold the code of a position, the other half that of a token.
Positions have codes instead of sines, because half precision can hardly distinguish the sines of
neighbours. The cross-attention of the first layer queries with the code of the position and finds
the frame that holds it. The frame's other half is the code of the next token, and these codes are
the rows of the embedding and of the output layer. All other sublayers compute and add noise: labels
do not depend on it but scores do, so a decoder that loses a token's keys and values is detected.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.models import (
    AEDConfig,
    AEDModel,
    ConvConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.shapes import expect

LABELS_PER_SECOND = 3.5  # as English in some thousand subwords
FRAMES_PER_SECOND = 12.5  # encoder frames
DURATIONS = (
    (),  # RNN-T
    (0, 1, 2, 3, 4),  # TDT
)
Step = tuple[int, int, bool, int]  # frame, previous labels, whether it emits a label, duration
CLASSES = 3  # enough to distinguish two labels on a frame and the blank after them
BLOCK_SHIFT = 3.0  # the prediction adds it to a block; the largest value of a frame is about 2
LABEL_LOGIT = 20.0  # logit of the planted label; blank has 13, other labels about 0
# standard deviation of noise in all weights and frames
NOISE = 0.1
BOS, EOS, PAD = 0, 1, 2
SPECIAL = 3  # the first tokens, which no text of an attention decoder contains
TOKEN_SCALE = 2.0  # scale of a token's code in the residual stream; a position's code has scale 1
QUERY_SCORE = 30.0  # attention score of the queried frame; others have about 0
ATTENTION_LOGIT = 8.0  # logit of the planted token: the largest, but not certain
SUBLAYER_NOISE = 0.5  # standard deviation that all other sublayers together add to a channel


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A model, a batch for it, and the hypotheses that every greedy decoder has to find."""

    model: Any  # a TransducerModel or an AEDModel
    encoded: Tensor  # (B, T, D)
    lengths: Tensor  # (B,) int64
    labels: list[list[int]]
    frames: list[list[int]]  # frame of each label
    prompt: Tensor | None = None  # (P,) int64, for an AEDModel

    def to(self, device: str, dtype: torch.dtype) -> "Planted":
        """The plan on a device and in a dtype; moves the model itself, without a copy."""
        return replace(
            self,
            model=self.model.to(device, dtype),
            encoded=self.encoded.to(device, dtype),
            lengths=self.lengths.to(device),
        )

    def joints(self) -> int:
        """Calls of the joint on the paths: labels and blanks."""
        utterances = zip(self.frames, self.lengths.tolist(), strict=True)
        return sum(len([*_path(*row, self.model.durations)]) for row in utterances)


@dataclass(frozen=True, kw_only=True)
class PlantedDecoder:
    """An encoder-decoder model, and the codes in which frames hold its text."""

    model: AEDModel
    places: Tensor  # (most, D / 2), codes of positions
    codes: Tensor  # (V, D / 2), codes of tokens


def seeded(make: Callable[..., Any], config: object, seed: int = 0) -> Any:
    """The model `make(config)` in eval mode, with seeded random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(config).eval().requires_grad_(False)


def planted(
    B: int,
    T: int,
    *,
    durations: Sequence[int] = (),
    V: int = 1025,
    width: int = 640,
    layers: int = 1,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
) -> Planted:
    """A batch with planted labels, and a transducer that emits them.

    Labels come in bursts with pauses between them, at most two on a frame.

    Args:
        B: number of utterances.
        T: frames of the longest.
        durations: durations of a TDT model, with 0 and 1; none for RNN-T.
        V: number of tokens, with blank.
        width: width of predictor and joint.
        layers: LSTM layers of the predictor.
        seed: seed of labels, frames and weights.
        lengths: frames of each utterance; None: from T to T / 2.

    Raises:
        ValueError: the width is too small for distinct codes of V tokens.
    """
    # with 16 ln V signs per block, two codes agree in fewer than half of them
    least = math.ceil(16 * CLASSES * math.log(V) * (4 / 3 if durations else 1))
    expect(width >= least, "width", f"at least {least} units for V={V}", width)
    ends = torch.linspace(T, T // 2, B).long() if lengths is None else torch.tensor(lengths)
    frames = [label_frames(length, (seed, b)) for b, length in enumerate(ends.tolist())]
    labels = [_labels(len(row), V - 1, (seed, b, 1)) for b, row in enumerate(frames)]
    generator = torch.Generator().manual_seed(seed)
    config = TransducerConfig(
        vocab_size=V - 1,
        predictor=LSTMConfig(width=width, layers=layers),
        joint_width=width,
        durations=durations,
        activation="relu",
    )
    size = width // CLASSES
    codes = _codes(V, len(durations), size, generator)
    model = seeded(TransducerModel, config)
    _plant_transducer(model, codes, generator)
    encoded = NOISE * torch.randn(B, T, width, generator=generator) - BLOCK_SHIFT
    for b in range(B):
        path = _path(frames[b], int(ends[b]), durations)
        encoded[b, :, : CLASSES * size] += _frame_codes(codes, labels[b], path, durations, T)
    return Planted(model=model, encoded=encoded, lengths=ends, labels=labels, frames=frames)


def planted_decoder(
    *,
    V: int = 1024,
    width: int = 256,
    layers: int = 12,
    heads: int = 4,
    most: int = 512,
    seed: int = 0,
) -> PlantedDecoder:
    """An encoder-decoder model that writes the text in the frames of `planted_text`.

    Args:
        V: number of tokens.
        width: width D of the decoder.
        layers: layers of the decoder.
        heads: attention heads.
        most: number of positions.
        seed: seed of all weights.

    Raises:
        ValueError: the width is too small for distinct codes.
    """
    # half of the width are signs: with 12 ln V, two codes agree in little more than half
    least = math.ceil(24 * math.log(max(V, most)))
    expect(width >= least, "width", f"at least {least} for V={V} and most={most}", width)
    config = AEDConfig(
        vocab_size=V,
        bos=BOS,
        eos=EOS,
        pad=PAD,
        encoder=ConvConfig(width=width),
        width=width,
        layers=layers,
        heads=heads,
        most=most,
        dropout=0.0,
    )
    model = seeded(AEDModel, config, seed)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(most, width // 2, generator=generator).sign()
    codes = torch.randn(V, width // 2, generator=generator).sign()
    _plant_attention(model, places, codes, generator)
    return PlantedDecoder(model=model, places=places, codes=codes)


def planted_text(
    decoder: PlantedDecoder, B: int, T: int, *, prompt: int = 1, seed: int = 0
) -> Planted:
    """A batch with planted texts: at most one label on a frame, then eos.

    Args:
        decoder: decoder that writes the texts.
        B: number of utterances, with T to T / 2 frames.
        T: frames of the longest.
        prompt: number of tokens before the text; the first is `bos`.
        seed: seed of labels and frames.
    """
    assert 1 <= prompt <= decoder.model.max_tokens - T, "the model has no positions for such texts"
    V, half = decoder.codes.shape
    lengths = torch.linspace(T, T // 2, B).long()
    frames = [
        _spread(label_frames(end, (seed, b))[: end - 1], end - 1)
        for b, end in enumerate(lengths.tolist())
    ]
    labels = [_labels(len(row), V, (seed, b, 1), SPECIAL) for b, row in enumerate(frames)]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SPECIAL, V, (prompt,), generator=generator)
    tokens[0] = BOS
    encoded = NOISE * torch.randn(B, T, 2 * half, generator=generator)
    for b, end in enumerate(lengths.tolist()):
        text = torch.tensor([*labels[b], EOS])
        places = decoder.places[prompt - 1 : prompt - 1 + len(text)]
        encoded[b, [*frames[b], end - 1]] += torch.cat([places, decoder.codes[text]], 1)
    return Planted(
        model=decoder.model,
        encoded=encoded,
        lengths=lengths,
        labels=labels,
        frames=frames,
        prompt=tokens,
    )


def ctc_log_probs(plan: Planted, errors: float = 0.0) -> Tensor:
    """Log-probabilities (B, T, V) of a CTC model for the same labels, with one peak per label.

    If a frame has two labels, the second one's peak is on the next frame.

    Args:
        plan: plan with the labels.
        errors: share of the labels that are replaced by another one.
    """
    B, T, _ = plan.encoded.shape
    blank = plan.model.blank
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, blank + 1, generator=draw)
    logits[..., blank] += LABEL_LOGIT / 2
    for b, (labels, end) in enumerate(zip(plan.labels, plan.lengths.tolist(), strict=True)):
        wrong = torch.rand(len(labels), generator=draw) < errors
        tokens = torch.tensor(labels) + wrong  # a wrong one is the next token, or blank
        logits[b, _spread(plan.frames[b], end), tokens] += LABEL_LOGIT
    return logits.log_softmax(-1)


def label_frames(T: int, seed: int | Sequence[int]) -> list[int]:
    """Frames of labels, distributed like subwords in T frames of speech: in bursts with pauses
    between them, and at most two on a frame.
    """
    density = LABELS_PER_SECOND / FRAMES_PER_SECOND
    draw = np.random.default_rng(seed)
    count = int(2 * T * density) + 20
    is_pause = draw.random(count) < 0.1  # one gap in ten, 28 % of the time
    pauses = is_pause * draw.gamma(2, 1.4, count)
    steps = draw.gamma(2, 0.36, count)
    gaps = (steps + pauses) / density  # 1 / density on average
    frames: list[int] = []
    for place in np.cumsum(gaps):
        t = max([int(place), *frames[-1:], *(frame + 1 for frame in frames[-2:-1])])
        if t >= T:
            break
        frames.append(t)
    return frames


def _spread(frames: Sequence[int], end: int) -> list[int]:
    """The frames moved apart, so that each label has its own frame before `end`."""
    N = len(frames)
    order = np.arange(N)
    later = np.maximum.accumulate(np.array(frames, dtype=int) - order) + order
    return np.minimum(later, end - N + order).tolist()


def _labels(N: int, V: int, seed: Sequence[int], first: int = 0) -> list[int]:
    """N labels from `first` to V. Label n is of class n modulo CLASSES, so neighbours differ."""
    drawn = np.random.default_rng(seed).integers((V - first) // CLASSES, size=N)
    return (first + CLASSES * drawn + np.arange(N) % CLASSES).tolist()


def _codes(V: int, durations: int, size: int, generator: torch.Generator) -> Tensor:
    """Codes (V + durations, size) of V tokens and of the durations, which share a quarter of the
    units.
    """
    each = size // (4 * durations) if durations else 0
    first = size - durations * each  # first unit of the durations
    codes = torch.randn(V + durations, size, generator=generator).sign()
    codes[V - 1] = 0  # blank has a bias instead
    codes[:, first:] = 0
    codes[V:, :first] = 0
    codes[V:, first:] = torch.eye(durations).repeat_interleave(each, 1)
    return codes


def _plant_transducer(model: TransducerModel, codes: Tensor, generator: torch.Generator) -> None:
    """Set weights with which the prediction raises the block of the last label's class, and the
    output layer reads the codes.
    """
    predictor: Any = model.predictor
    lstm = predictor.lstm
    H = lstm.hidden_size
    V = model.blank + 1
    size = codes.shape[1]
    for module in (predictor, model.predictor_projection, model.output):
        for weight in module.parameters():
            deviation = NOISE / weight.shape[-1] ** 0.5
            weight.normal_(0, deviation, generator=generator)
    classes = torch.arange(H) * CLASSES // H  # class of each predictor unit
    # the last class also represents the initial blank, whose embedding is zero
    last_class = (classes == CLASSES - 1).float()
    is_own = classes == torch.arange(V)[:, None] % CLASSES  # (V, H)
    predictor.embedding.weight += 2.0 * (is_own.float() - last_class)
    predictor.embedding.weight[V - 1] = 0
    lstm.bias_ih_l0[2 * H : 3 * H] += 2.0 * last_class
    output = 2.0  # value of a unit of the label's class
    for layer in range(lstm.num_layers):
        gates = getattr(lstm, f"bias_ih_l{layer}").view(4, H)  # input, forget, candidate, output
        gates += torch.tensor([6.0, -6.0, 0.0, 6.0])[:, None]  # so only the last label counts
        # the candidate is the layer's input
        getattr(lstm, f"weight_ih_l{layer}")[2 * H : 3 * H] += torch.eye(H)
        output = math.tanh(math.tanh(output))
    for k in range(CLASSES):
        own = classes == k
        block = slice(k * size, (k + 1) * size)
        model.predictor_projection.weight[block, own] += BLOCK_SHIFT / (output * own.sum())
    positive = codes.clamp(min=0).sum(1, keepdim=True)  # units that pass the relu
    code_weights = LABEL_LOGIT / positive.clamp(min=1) * codes
    model.output.weight[:, : CLASSES * size] += code_weights.repeat(1, CLASSES)
    model.output.bias[V - 1] += 0.65 * LABEL_LOGIT


def _frame_codes(
    codes: Tensor, labels: list[int], path: Iterator[Step], durations: Sequence[int], T: int
) -> Tensor:
    """The codes (T, CLASSES * size) of an utterance's frames: of each label, and with TDT of each
    duration.
    """
    frames = torch.zeros(T, CLASSES, codes.shape[1])
    for t, n, is_label, duration in path:
        block = frames[t, (n - 1) % CLASSES]
        if is_label:
            block += codes[labels[n]]
        if durations:
            block += codes[durations.index(duration) - len(durations)]
    return frames.flatten(1)


def _path(frames: list[int], length: int, durations: Sequence[int]) -> Iterator[Step]:
    """The path to labels on these frames; with TDT by the longest durations that skip no label."""
    t = n = 0
    while t < length:
        is_label = frames[n : n + 1] == [t]
        following, *_ = [*frames[n + is_label :], math.inf]
        fitting = (duration for duration in durations if t + duration <= following)
        duration = max(fitting, default=1 - is_label)
        yield t, n, is_label, duration
        n += is_label
        t += duration


def _plant_attention(
    model: AEDModel, places: Tensor, codes: Tensor, generator: torch.Generator
) -> None:
    """Set weights with which the first layer queries the frame of its position and the output reads
    codes; all other sublayers add noise.

    Row r of that layer's query and key is channel r modulo D / 2 of the position's code, and row r
    of its value is that channel of the token's code.
    """
    D = model.config.width
    half = D // 2
    model.positions.copy_(torch.cat([places, torch.zeros_like(places)], 1))
    after_norm = TOKEN_SCALE * math.sqrt(
        2 / (1 + TOKEN_SCALE**2)
    )  # scale of a token's code after the last norm
    model.embedding.weight.zero_()
    model.embedding.weight[:, half:] = codes * ATTENTION_LOGIT / (half * after_norm)
    model.embedding.weight[PAD] = 0
    model.norm.weight[:half] = 0
    share = SUBLAYER_NOISE / math.sqrt(3 * model.config.layers)
    layers: Any = model.layers
    for layer in layers:
        own, cross = layer.self_attention, layer.cross_attention
        for linear in (own.qkv, cross.key_value):
            linear.bias.normal_(0, NOISE, generator=generator)
        for linear in (own.out, cross.out, layer.feed_forward[2]):
            linear.weight.normal_(0, share / linear.in_features**0.5, generator=generator)
            linear.bias.normal_(0, share / 10, generator=generator)
        own.out.weight *= 3  # mixing tokens makes the values smaller
    attention = layers[0].cross_attention
    signs = math.sqrt(D // attention.heads)  # a score is a sum of D / heads products over its root
    key, value = attention.key_value.weight.chunk(2)
    for weights in (attention.query.weight, attention.query.bias, key, value):
        weights.zero_()
    picks = torch.eye(half).repeat(2, 1)  # (D, D / 2)
    # the norm before it scales 1 to the root of 2
    attention.query.weight[:, :half] = picks * QUERY_SCORE / (math.sqrt(2) * signs)
    key[:, :half] = picks
    value[:, half:] = picks
    attention.out.weight[half:] += TOKEN_SCALE / 2 * picks.T
