"""Models that emit labels planned before, so that the density of labels, which decides how fast
decoding is, is not left to chance.

Random weights emit far too many labels or none, and a trained model has one density only. Here real
models get weights that follow a script, and frames that hold it in codes: random vectors of signs.

Of a `TransducerModel`, label n of an utterance comes from the class n modulo 3 of the vocabulary,
so the last label's class tells the model how far it is. The hidden layer of the joint has a block
of units for each class, and the prediction lifts the block of the last label's class above the
threshold of the relu. In that block the frame holds the code of the next label, and the output
layer's rows are these codes. Where the block is empty blank wins. The embedding of blank is zero,
as it is in NeMo.

Of an `AEDModel`, half of the channels hold the code of a position, half that of a token. Positions
have such codes instead of sines, whose neighbours half precision can hardly tell apart. The
cross-attention of the first layer asks with that code, and finds the frame that holds it; the
frame's other half is the code of the next token, and the rows of the embedding, which are the
output's as well, are these codes. All other sublayers compute and add noise: labels do not depend
on it, but scores do, so a decoder that loses a token's keys and values is found out.
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
FRAMES_PER_SECOND = 12.5  # of the encoder
DURATIONS = (
    (),  # of an RNN-T model
    (0, 1, 2, 3, 4),  # of a TDT model
)
Joint = tuple[int, int, bool, int]  # frame, labels before, whether one more is found, and the jump
CLASSES = 3  # two labels on a frame and the silence after them are told apart
LIFT = 3.0  # by which the prediction raises its block; the largest value of a frame is about 2
LOGIT = 20.0  # of the label that is meant; blank has 13, the other labels' spread around 0
# standard deviation of what is added to all values, so that they look like a trained model's
NOISE = 0.1
BOS, EOS, PAD = 0, 1, 2
SPECIAL = 3  # tokens that no text of an attention decoder holds come first
VALUE = 2.0  # of a token's code in the residual stream, where that of the position is 1
ASK = 30.0  # attention score of the frame that is meant; the others' spread around 0
ATTENTION_LOGIT = 8.0  # of the token that is meant: the best, and not certain
MURMUR = 0.5  # of what all other sublayers together add to a channel


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A model, a batch for it, and what every greedy decoder has to find in it."""

    model: Any  # a TransducerModel or an AEDModel
    encoded: Tensor  # (B, T, D)
    lengths: Tensor  # (B,) int64
    labels: list[list[int]]
    frames: list[list[int]]  # of these labels
    prompt: Tensor | None = None  # (P,) int64, of an AEDModel

    def to(self, device: str, dtype: torch.dtype) -> "Planted":
        """The plan with model and batch there; the model is moved itself, not copied."""
        return replace(
            self,
            model=self.model.to(device, dtype),
            encoded=self.encoded.to(device, dtype),
            lengths=self.lengths.to(device),
        )

    def joints(self) -> int:
        """Joint calls of the paths, one frame and one prediction each: labels and blanks."""
        utterances = zip(self.frames, self.lengths.tolist(), strict=True)
        return sum(len([*_path(*one, self.model.durations)]) for one in utterances)


@dataclass(frozen=True, kw_only=True)
class PlantedDecoder:
    """An encoder-decoder model, and the codes by which frames tell it what to say."""

    model: AEDModel
    places: Tensor  # (most, D / 2), of positions
    codes: Tensor  # (V, D / 2), of tokens


def seeded(make: Callable[..., Any], config: object, seed: int = 0) -> Any:
    """The model `make(config)` in eval mode, with random weights, the same ones each time."""
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
    """A batch whose labels are known, and a transducer that emits them.

    Labels come in bursts with pauses between them, two on a frame at most.

    Args:
        B: utterances.
        T: frames of the longest.
        durations: of a TDT model, 0 and 1 among them; none for an RNN-T.
        V: tokens with blank.
        width: of predictor and joint.
        layers: of the predictor's LSTM.
        seed: of labels, frames and weights.
        lengths: frames of each utterance; None for T down to T / 2.

    Raises:
        ValueError: codes of this width cannot keep V tokens apart.
    """
    # 16 ln V signs a block: two codes are then alike in fewer than half of them
    least = math.ceil(16 * CLASSES * math.log(V) * (4 / 3 if durations else 1))
    expect(width >= least, "width", f"at least {least} units for V={V}", width)
    ends = torch.linspace(T, T // 2, B).long() if lengths is None else torch.tensor(lengths)
    frames = [speech(length, (seed, b)) for b, length in enumerate(ends.tolist())]
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
    encoded = NOISE * torch.randn(B, T, width, generator=generator) - LIFT
    for b in range(B):
        path = _path(frames[b], int(ends[b]), durations)
        spelled = _spell(codes, labels[b], path, durations, T)
        encoded[b, :, : CLASSES * size] += spelled.flatten(1)
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
    """An encoder-decoder model that says what frames of `planted_text` tell it.

    Args:
        V: tokens of the decoder.
        width: of the decoder, D.
        layers: of the decoder.
        heads: of its attention.
        most: tokens that it has positions for.
        seed: of all weights.

    Raises:
        ValueError: codes of this width cannot be kept apart.
    """
    # half of the width are signs: two of 12 ln V signs are alike in little more than half
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
    """A batch whose texts are known: labels one on a frame at most, and eos behind them.

    Args:
        decoder: which is to say the texts.
        B: utterances.
        T: frames of the longest; the others have T down to T / 2.
        prompt: tokens before the text, `bos` first.
        seed: of labels and frames.
    """
    assert 1 <= prompt <= decoder.model.max_tokens - T, "the model has no positions for such texts"
    V, half = decoder.codes.shape
    lengths = torch.linspace(T, T // 2, B).long()
    frames = [
        _one_a_frame(speech(end, (seed, b))[: end - 1], end - 1)
        for b, end in enumerate(lengths.tolist())
    ]
    labels = [_labels(len(row), V, (seed, b, 1), SPECIAL) for b, row in enumerate(frames)]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SPECIAL, V, (prompt,), generator=generator)
    tokens[0] = BOS
    encoded = NOISE * torch.randn(B, T, 2 * half, generator=generator)
    for b, end in enumerate(lengths.tolist()):
        said = torch.tensor([*labels[b], EOS])
        asked = decoder.places[prompt - 1 : prompt - 1 + len(said)]
        encoded[b, [*frames[b], end - 1]] += torch.cat([asked, decoder.codes[said]], 1)
    return Planted(
        model=decoder.model,
        encoded=encoded,
        lengths=lengths,
        labels=labels,
        frames=frames,
        prompt=tokens,
    )


def ctc_log_probs(plan: Planted, errors: float = 0.0) -> Tensor:
    """What a CTC model would say of the same speech: log-probabilities (B, T, tokens and blank), a
    peak a label; of two on a frame the second is one later.

    Args:
        plan: whose labels are said.
        errors: the share of labels that are taken for another one.
    """
    B, T, _ = plan.encoded.shape
    blank = plan.model.blank
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, blank + 1, generator=draw)
    logits[..., blank] += LOGIT / 2
    for b, (labels, end) in enumerate(zip(plan.labels, plan.lengths.tolist(), strict=True)):
        wrong = torch.rand(len(labels), generator=draw) < errors
        found = torch.tensor(labels) + wrong  # the next token, or blank behind the last
        logits[b, _one_a_frame(plan.frames[b], end), found] += LOGIT
    return logits.log_softmax(-1)


def speech(T: int, seed: int | Sequence[int]) -> list[int]:
    """Frames of labels that lie like subwords in T frames of speech: in bursts with pauses between
    them, and two on a frame at most.
    """
    density = LABELS_PER_SECOND / FRAMES_PER_SECOND
    draw = np.random.default_rng(seed)
    many = int(2 * T * density) + 20
    is_pause = draw.random(many) < 0.1  # one gap in ten, 28 % of the time
    pauses = is_pause * draw.gamma(2, 1.4, many)
    steps = draw.gamma(2, 0.36, many)
    gaps = (steps + pauses) / density  # 1 / density on average
    frames: list[int] = []
    for place in np.cumsum(gaps):
        t = max([int(place), *frames[-1:], *(frame + 1 for frame in frames[-2:-1])])
        if t >= T:
            break
        frames.append(t)
    return frames


def _one_a_frame(frames: Sequence[int], end: int) -> list[int]:
    """As many frames before `end`, one later where a label has that frame already, and earlier
    where they would end too late.
    """
    N = len(frames)
    order = np.arange(N)
    later = np.maximum.accumulate(np.array(frames, dtype=int) - order) + order
    return np.minimum(later, end - N + order).tolist()


def _labels(N: int, V: int, seed: Sequence[int], first: int = 0) -> list[int]:
    """N labels from `first` to V; that of place n is of class n modulo CLASSES, so neighbours
    differ.
    """
    drawn = np.random.default_rng(seed).integers((V - first) // CLASSES, size=N)
    return (first + CLASSES * drawn + np.arange(N) % CLASSES).tolist()


def _codes(V: int, durations: int, size: int, generator: torch.Generator) -> Tensor:
    """Signs for V tokens; a quarter of the units is shared out among the durations. (V + durations,
    size).
    """
    each = size // (4 * durations) if durations else 0
    first = size - durations * each  # of the units of durations
    codes = torch.randn(V + durations, size, generator=generator).sign()
    codes[V - 1] = 0  # blank has a bias instead
    codes[:, first:] = 0
    codes[V:, :first] = 0
    codes[V:, first:] = torch.eye(durations).repeat_interleave(each, 1)
    return codes


def _plant_transducer(model: TransducerModel, codes: Tensor, generator: torch.Generator) -> None:
    """Weights by which the prediction lifts the block of the last label's class, and the output
    layer reads the codes.
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
    classes = torch.arange(H) * CLASSES // H  # that the units of the predictor stand for
    # also stands for the blank before the first label, whose embedding is zero
    last_class = (classes == CLASSES - 1).float()
    is_own = classes == torch.arange(V)[:, None] % CLASSES  # (V, H)
    predictor.embedding.weight += 2.0 * (is_own.float() - last_class)
    predictor.embedding.weight[V - 1] = 0
    lstm.bias_ih_l0[2 * H : 3 * H] += 2.0 * last_class
    output = 2.0  # of a unit of the label's class
    for layer in range(lstm.num_layers):
        gates = getattr(lstm, f"bias_ih_l{layer}").view(4, H)  # input, forget, candidate, output
        gates += torch.tensor([6.0, -6.0, 0.0, 6.0])[:, None]  # so only the last label counts
        # the candidate is the embedding, or what lies below
        getattr(lstm, f"weight_ih_l{layer}")[2 * H : 3 * H] += torch.eye(H)
        output = math.tanh(math.tanh(output))  # what the layer makes of it
    for k in range(CLASSES):
        own = classes == k
        block = slice(k * size, (k + 1) * size)
        model.predictor_projection.weight[block, own] += LIFT / (output * own.sum())
    positive = codes.clamp(min=0).sum(1, keepdim=True)  # the relu lets pass what is positive
    code_weights = LOGIT / positive.clamp(min=1) * codes
    model.output.weight[:, : CLASSES * size] += code_weights.repeat(1, CLASSES)
    model.output.bias[V - 1] += 0.65 * LOGIT


def _spell(
    codes: Tensor, labels: list[int], path: Iterator[Joint], durations: Sequence[int], T: int
) -> Tensor:
    """The codes (T, CLASSES, size) of an utterance's frames: each label's, and of TDT that of the
    jump behind it.
    """
    spelled = torch.zeros(T, CLASSES, codes.shape[1])
    code_of = dict(zip(durations, codes[len(codes) - len(durations) :], strict=True))
    for t, n, is_label, jump in path:
        block = spelled[t, (n - 1) % CLASSES]
        if is_label:
            block += codes[labels[n]]
        if durations:
            block += code_of[jump]
    return spelled


def _path(frames: list[int], length: int, durations: Sequence[int]) -> Iterator[Joint]:
    """The path to labels on these frames; of TDT by the longest durations that jump over none."""
    t = n = 0
    while t < length:
        is_label = frames[n : n + 1] == [t]
        following, *_ = [*frames[n + is_label :], math.inf]
        jump = max((one for one in durations if t + one <= following), default=1 - is_label)
        yield t, n, is_label, jump
        n += is_label
        t += jump


def _plant_attention(
    model: AEDModel, places: Tensor, codes: Tensor, generator: torch.Generator
) -> None:
    """Weights by which the first layer asks for the frame of its position, and the output reads
    codes; all other sublayers add noise.

    Every channel of a head of that layer stands for one of the position's channels in query and
    key, and for one of the token's in the value: row r for channel r modulo D / 2.
    """
    D = model.config.width
    half = D // 2
    model.positions.copy_(torch.cat([places, torch.zeros_like(places)], 1))
    after_norm = VALUE * math.sqrt(2 / (1 + VALUE**2))  # a token's code in what the output reads
    model.embedding.weight.zero_()
    model.embedding.weight[:, half:] = codes * ATTENTION_LOGIT / (half * after_norm)
    model.embedding.weight[PAD] = 0
    model.norm.weight[:half] = 0
    share = MURMUR / math.sqrt(3 * model.config.layers)
    layers: Any = model.layers
    for layer in layers:
        own, cross = layer.self_attention, layer.cross_attention
        for linear in (own.qkv, cross.key_value):
            linear.bias.normal_(0, NOISE, generator=generator)
        for linear in (own.out, cross.out, layer.feed_forward[2]):
            linear.weight.normal_(0, share / linear.in_features**0.5, generator=generator)
            linear.bias.normal_(0, share / 10, generator=generator)
        own.out.weight *= 3  # since it mixes tokens, which makes the values smaller
    attention = layers[0].cross_attention
    signs = math.sqrt(D // attention.heads)  # a score is the sum of as many over their root
    key, value = attention.key_value.weight.chunk(2)
    for weights in (attention.query.weight, attention.query.bias, key, value):
        weights.zero_()
    picks = torch.eye(half).repeat(2, 1)  # (D, D / 2)
    # the norm before makes 1 the root of 2
    attention.query.weight[:, :half] = picks * ASK / (math.sqrt(2) * signs)
    key[:, :half] = picks
    value[:, half:] = picks
    attention.out.weight[half:] += VALUE / 2 * picks.T
