"""Transducers that emit labels planned before, so that the density of labels, which decides how
fast decoding is, is not left to chance.

Random weights emit far too many labels or none, and a trained model has one density only. Here a
real `TransducerModel` gets weights that follow a script. Label n of an utterance comes from the
class n modulo 3 of the vocabulary, so the last label's class tells the model how far it is. The
hidden layer of the joint has a block of units for each class, and the prediction lifts the block of
the last label's class above the threshold of the relu. In that block the frame holds the code of
what is to be said next, a random vector of signs, and the output layer's rows are these codes.
Where the block is empty blank wins. The embedding of blank is zero, as it is in NeMo.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
import torch
from torch import Tensor

from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.models.transducer import LSTMPredictor
from asrkit.shapes import expect, whole

DURATIONS: Sequence[tuple[int, ...]] = (
    (),  # of an RNN-T model
    (0, 1, 2, 3, 4),  # of a TDT model
)
CLASSES = 3  # two labels on a frame and the silence after them are told apart
LIFT = 3.0  # by which the prediction raises its block; the largest value of a frame is about 2
LOGIT = 20.0  # of the label that is meant; blank has 13, the other labels' spread around 0
# standard deviation of what is added to all values, so that they look like a trained model's
NOISE = 0.1


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A model, a batch for it, and what every greedy decoder has to find in it."""

    model: TransducerModel
    encoded: Tensor  # (B, T, D)
    lengths: Tensor  # (B,) int64
    labels: list[list[int]]
    frames: list[list[int]]  # of these labels

    def joints(self) -> int:
        """Joint calls of the paths, one frame and one prediction each: labels and blanks."""
        durations = self.model.durations
        total = 0
        for frames, length in zip(self.frames, self.lengths.tolist(), strict=True):
            t = 0
            while t < length:
                here = frames.count(t)
                if durations:
                    total += max(here, 1)
                    t += _jump(frames, t, durations)
                else:
                    total += here + 1
                    t += 1
        return total


def planted(  # noqa: PLR0913 sizes and densities of a made-up batch
    B: int,
    T: int,
    *,
    durations: Sequence[int] = (),
    V: int = 1025,
    width: int = 640,
    layers: int = 1,
    labels_per_second: float = 3.5,
    frames_per_second: float = 12.5,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
) -> Planted:
    """A batch whose labels are known, and a transducer that emits them.

    Labels come in bursts with pauses between them, two on a frame at most. The default density is
    that of English in some thousand subwords.

    Args:
        B: utterances.
        T: frames of the longest.
        durations: of a TDT model, 0 and 1 among them; none for an RNN-T.
        V: tokens with blank.
        width: of predictor and joint.
        layers: of the predictor's LSTM.
        labels_per_second: how dense labels lie, together with the next.
        frames_per_second: of the encoder.
        seed: of labels, frames and weights.
        lengths: frames of each utterance; None for T down to T / 2.

    Raises:
        ValueError: a size is out of range, or codes of this width cannot keep V tokens apart.
    """
    _expect_sizes(B, T, V, width, durations)
    _expect_rates(labels_per_second, frames_per_second)
    density = labels_per_second / frames_per_second
    ends = _ends(B, T, lengths)
    frames = []
    labels = []
    for b, length in enumerate(ends.tolist()):
        frames.append(speech(length, density, (seed, b)))
        labels.append(_labels(len(frames[b]), V, (seed, b, 1)))
    generator = torch.Generator().manual_seed(seed)
    config = TransducerConfig(
        vocab_size=V - 1,
        predictor=LSTMConfig(width=width, layers=layers),
        joint_width=width,
        durations=durations,
        activation="relu",
    )
    size = width // CLASSES
    codes = _codes(V, len(config.durations), size, generator)
    with torch.random.fork_rng(devices=[]):
        model = TransducerModel(config).eval().requires_grad_(False)
    _plant(model, codes, generator)
    encoded = NOISE * torch.randn(B, T, width, generator=generator) - LIFT
    for b, script in enumerate(zip(labels, frames, strict=True)):
        spelled = _spell(codes, *script, T, config.durations)
        encoded[b, :, : CLASSES * size] += spelled.flatten(1)
    return Planted(model=model, encoded=encoded, lengths=ends, labels=labels, frames=frames)


def _ends(B: int, T: int, lengths: Sequence[int] | None) -> Tensor:
    """Frames of each utterance, (B,)."""
    if lengths is None:
        return torch.linspace(T, T // 2, B).long()
    as_many = len(lengths) == B
    in_range = all(1 <= length <= T for length in lengths)
    expect(as_many and in_range, "lengths", f"{B} of 1 to T={T} frames", lengths)
    return torch.tensor(lengths)


def _expect_rates(labels_per_second: float, frames_per_second: float) -> None:
    expect(
        0 < labels_per_second <= 2 * frames_per_second < inf,
        "labels_per_second, frames_per_second",
        "above 0, two labels a frame at most",
        (labels_per_second, frames_per_second),
    )


def _expect_sizes(B: int, T: int, V: int, width: int, durations: Sequence[int]) -> None:
    sizes = whole(B, 1) and whole(T, 2) and whole(V, 2 * CLASSES)
    expect(sizes, "B, T, V", "whole numbers of at least 1, 2 and 6", (B, T, V))
    # 16 ln V signs a block: two codes are then alike in fewer than half of them
    signs = 16 * np.log(V)
    if durations:
        complete = {0, 1} <= {*durations}
        expect(complete, "durations", "none, or 0 and 1 among them", durations)
        signs = 4 / 3 * signs
    least = ceil(CLASSES * signs)
    expect(width >= least, "width", f"at least {least} units for V={V}", width)


def speech(T: int, density: float, seed: int | Sequence[int]) -> list[int]:
    """Frames of labels that lie like subwords in speech: in bursts with pauses between them.

    Args:
        T: frames of the utterance.
        density: labels a frame; there are two on a frame at most.
        seed: of the draw.
    """
    draw = np.random.default_rng(seed)
    many = int(2 * T * density) + 20
    is_pause = draw.random(many) < 0.1  # one gap in ten, 28 % of the time
    pauses = is_pause * draw.gamma(2, 1.4, many)
    steps = draw.gamma(2, 0.36, many)
    gaps = (steps + pauses) / density  # 1 / density on average
    frames: list[int] = []
    for place in np.cumsum(gaps):
        t = int(place)
        if frames:
            t = max(t, frames[-1])
        if len(frames) > 1:
            t = max(t, frames[-2] + 1)
        if t >= T:
            break
        frames.append(t)
    return frames


def ctc_log_probs(plan: Planted) -> Tensor:
    """What a CTC model would say of the same speech, (B, T, V): a peak a label; of two on a frame
    the second is one later.
    """
    B, T, _ = plan.encoded.shape
    V = plan.model.blank + 1
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=draw)
    logits[..., -1] += LOGIT / 2
    for b in range(B):
        place = -1
        for label, frame in zip(plan.labels[b], plan.frames[b], strict=True):
            place = max(frame, place + 1)
            place = min(place, T - 1)
            logits[b, place, label] += LOGIT
    return logits.log_softmax(-1)


def _labels(N: int, V: int, seed: Sequence[int]) -> list[int]:
    """N labels; that of place n is n modulo CLASSES, so neighbours differ."""
    each_class = (V - 1) // CLASSES
    draw = np.random.default_rng(seed)
    drawn = draw.integers(each_class, size=N)
    place = np.arange(N)
    labels = CLASSES * drawn + place % CLASSES
    return labels.tolist()


def _codes(V: int, durations: int, size: int, generator: torch.Generator) -> Tensor:
    """Signs for V tokens; a quarter of the units is shared out among the durations. (V + durations,
    size).
    """
    each = 0
    if durations:
        each = size // (4 * durations)
    first = size - durations * each  # of the units of durations
    codes = torch.randn(V + durations, size, generator=generator).sign()
    codes[V - 1] = 0  # blank has a bias instead
    codes[:, first:] = 0
    duration_codes = torch.eye(durations).repeat_interleave(each, 1)
    codes[V:] = torch.nn.functional.pad(duration_codes, (first, 0))
    return codes


def _plant(model: TransducerModel, codes: Tensor, generator: torch.Generator) -> None:
    """Weights by which the prediction lifts the block of the last label's class, and the output
    layer reads the codes.
    """
    predictor = model.predictor
    assert isinstance(predictor, LSTMPredictor)
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
    label_classes = torch.arange(V) % CLASSES
    is_own = classes == label_classes[:, None]  # (V, H)
    predictor.embedding.weight += 2.0 * (is_own.float() - last_class)
    predictor.embedding.weight[V - 1] = 0
    output = torch.tensor(2.0)  # of a unit of the label's class
    for layer in range(lstm.num_layers):
        bias = getattr(lstm, f"bias_ih_l{layer}")
        input_gate, forget_gate, candidate, output_gate = bias.split(H)
        input_gate += 6.0
        forget_gate -= 6.0  # so only the last label counts
        output_gate += 6.0
        if layer == 0:
            candidate += 2.0 * last_class
        # the candidate is the embedding, or what lies below
        weight = getattr(lstm, f"weight_ih_l{layer}")
        candidate_weight = weight[2 * H : 3 * H]
        candidate_weight += torch.eye(H)
        output = output.tanh().tanh()  # what the layer makes of it
    projection = model.predictor_projection.weight
    for k in range(CLASSES):
        own = classes == k
        block = slice(k * size, (k + 1) * size)
        projection[block, own] += LIFT / (output * own.sum())
    positive = codes.clamp(min=0).sum(1, keepdim=True)  # the relu lets pass what is positive
    code_weights = LOGIT / positive.clamp(min=1) * codes
    model.output.weight[:, : CLASSES * size] += code_weights.repeat(1, CLASSES)
    model.output.bias[V - 1] += 0.65 * LOGIT


def _spell(
    codes: Tensor, labels: list[int], frames: list[int], T: int, durations: Sequence[int]
) -> Tensor:
    """The codes (T, CLASSES, size) of an utterance's frames: each label's, and of TDT that of the
    longest jump to the next.
    """
    spelled = torch.zeros(T, CLASSES, codes.shape[1])
    n = 0
    code_of = dict(zip(durations, codes[len(codes) - len(durations) :], strict=True))
    for t in range(T):
        here = frames.count(t)
        jump = _jump(frames, t, durations)
        for i in range(max(here, 1)):  # without a label there may be a duration still
            block = spelled[t, (n + i - 1) % CLASSES]
            if here:
                block += codes[labels[n + i]]
            if durations and i + 1 < here:
                block += code_of[0]
            elif durations:
                block += code_of[jump]
        n += here
    return spelled


def _jump(frames: list[int], t: int, durations: Sequence[int]) -> int:
    """The longest duration that does not jump over the next label; 0 of none."""
    following = t + max(durations, default=0)
    for frame in frames:
        if frame > t:
            following = frame
            break
    short = [duration for duration in durations if duration <= following - t]
    return max(short, default=0)


def kind(durations: Sequence[int]) -> str:
    """What names of cases call a transducer with these durations: "tdt", or "rnnt" without any."""
    if durations:
        return "tdt"
    return "rnnt"
