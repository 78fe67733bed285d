"""The loss of a training batch for each kind of model, and the form of a transducer's joint.

A transducer is trained by the loss of RNN-T or TDT plus an auxiliary CTC loss, an encoder-decoder
model by cross-entropy plus CTC, a CTC model by CTC alone.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.devices import autocast, to_device
from asrkit.losses import (
    ctc_loss,
    pack_joint,
    rnnt_loss,
    rnnt_loss_lean,
    rnnt_loss_packed,
    split_batches,
    tdt_loss,
    tdt_loss_lean,
)
from asrkit.models import AEDConfig, AEDModel, CTCConfig, CTCModel, TransducerModel
from asrkit.models.common import strided
from asrkit.models.presets import Model, ModelConfig
from asrkit.shapes import expect, valid_mask
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.graphs import StepGraphs

HALF = (torch.float16, torch.bfloat16)
IGNORED = -100  # target that cross-entropy skips
MEMORY_SHARE = 0.5  # share of a GPU that the joint may fill; weights and encoder need the rest
SPLIT_SHARE = 1 / 16  # share of a GPU that the joint of a sub-batch may fill
PRODUCT_WIDTH = 224  # D V / (D + V) up to which lean was as fast on a CPU; see chooses_lean
PAGED_BYTES = 1 << 27  # joint from which lean was faster on a CPU whatever D and V are


class TrainingLoss(NamedTuple):
    """Loss of a batch: a scalar in nats per label, and the form of the joint that it used.

    `joint` is "full", "packed", "split" or "lean", or "" for a model without a joint.
    """

    per_label: Tensor
    joint: str


def alignable(
    model_config: ModelConfig, lengths: Tensor, targets: Tensor, target_lengths: Tensor
) -> Tensor:
    """Utterances that the model's own loss, and the auxiliary CTC loss, can align: bool (2, B).

    Tensors are those of a `Prepared` batch. CTC needs an encoder frame for each label, and one more
    between equal labels. TDT needs moves that end at the last frame. RNN-T and an attention decoder
    align any labels.
    """
    frames = strided(lengths, model_config.encoder.subsampling)
    equal = targets[:, 1:] == targets[:, :-1]
    equal &= valid_mask(target_lengths - 1, equal.shape[1])
    by_ctc = target_lengths + equal.sum(1) <= frames
    anything = torch.ones_like(by_ctc)
    if isinstance(model_config, CTCConfig):
        return torch.stack((by_ctc, anything))
    durations = getattr(model_config, "durations", ())
    if not durations or {0, 1} <= set(durations):
        return torch.stack((anything, by_ctc))
    # without duration 0 each label moves too; the last move is a blank
    least = 1 if 0 in durations else target_lengths + 1
    moves = torch.tensor(_most_moves(int(frames.max()), durations), device=frames.device)
    return torch.stack((moves[frames] >= least, by_ctc))


def _most_moves(frames: int, durations: Sequence[int]) -> list[float]:
    """Most moves by durations above 0 that add up to 0, 1, ... frames; -inf if there are none."""
    most = [0.0]
    for end in range(1, frames + 1):
        before = [most[end - duration] for duration in durations if 0 < duration <= end]
        most.append(1 + max(before, default=-inf))
    return most


def label_counts(model_config: ModelConfig, batch: Prepared) -> Tensor:
    """Number of labels in `alignable` utterances, (2,): at least 1, or 0 if none is alignable."""
    fits = alignable(model_config, batch.lengths, batch.targets, batch.target_lengths)
    return (batch.target_lengths * fits).sum(1).clamp(min=1) * fits.any(1)


def expect_trainable(model_config: ModelConfig, config: TrainConfig, tokens: int) -> None:
    """ValueError if the model, its training config and the tokenizer do not fit together."""
    kinds = "a TransducerConfig, CTCConfig or AEDConfig"
    is_config = isinstance(model_config, ModelConfig)
    expect(is_config, "model_config", kinds, type(model_config).__name__)
    if isinstance(model_config, AEDConfig):
        special = (model_config.bos, model_config.eos, model_config.pad)
        wanted = f"tokens after the tokenizer's {tokens}"
        remedy = "Make vocab_size 3 larger than the tokenizer's."
        expect(min(special) >= tokens, "bos, eos, pad", wanted, special, remedy)
    else:
        fits = tokens == model_config.vocab_size
        expect(fits, "vocab_size", str(tokens), model_config.vocab_size)
    if not isinstance(model_config, CTCConfig):
        fits = model_config.ctc or config.ctc_weight == 0
        expect(fits, "ctc_weight", "0 for a model without a CTC head", config.ctc_weight)
    _expect_packable(config.joint, getattr(model_config, "durations", ()))
    fits = not (config.graphs and isinstance(model_config, CTCConfig))
    expect(fits, "graphs", "False for a CTC model", config.graphs)


def training_loss(
    model: Model,
    batch: Prepared,
    config: TrainConfig,
    step_labels: Tensor | None = None,
    graphs: StepGraphs | None = None,
) -> TrainingLoss:
    """Loss of a batch in nats per label: a transducer's or a decoder's plus CTC, or CTC alone.

    A transducer has the loss of RNN-T, or of TDT if it has durations. The logits of a full joint
    reach the loss in the dtype they are computed in. An encoder-decoder model has the cross-entropy
    of labels and eos, `attention_loss`. Lengths and targets on the host stay there for the checks,
    so that nothing waits for a GPU.

    An utterance without an alignment has loss 0, and its labels do not count. The loss of a batch
    without any alignment is NaN.

    Args:
        model: A model in training mode.
        batch: A batch of `prepare_batch`, or one whose tensors are all on the model's device.
        config: Precision; for a transducer also `joint`, `ctc_weight`, `sigma` and `omega`, for an
            encoder-decoder model `ctc_weight` and `smoothing`.
        step_labels: `label_counts` summed over all batches of a step, whose losses then add up to
            the loss of the step. None takes those of this batch.
        graphs: Encoder and predictor of `model` in CUDA graphs; not for a CTC model.

    Raises:
        ValueError: joint="lean" or "packed" with a joint that they cannot express.
    """
    device = next(model.parameters()).device
    features = to_device(batch.features, device)
    labels = (batch.targets, batch.target_lengths)
    if step_labels is None:
        step_labels = label_counts(model.config, batch)
    own_labels, ctc_labels = step_labels
    joint = ""
    passes: Any = graphs or model
    with autocast(device.type, config.dtype(device)):
        if isinstance(model, CTCModel):
            ctc, lengths = model(features, batch.lengths)
        else:
            encoded, lengths, ctc = passes.encode(features, batch.lengths)
            if isinstance(model, AEDModel):
                total = attention_loss(model, encoded, lengths, *labels, config.smoothing)
            else:
                fits, _ = alignable(model.config, batch.lengths, *labels)
                predicted = passes.rows(to_device(batch.targets, device))  # (B, U1, D)
                halves = (encoded, predicted)
                total, joint = transducer_loss(model, *halves, lengths, *labels, config, fits)
    if isinstance(model, CTCModel):
        return TrainingLoss(total_ctc_loss(ctc, lengths, *labels, model.blank) / own_labels, joint)
    per_label = total / own_labels
    if config.ctc_weight:
        total_ctc = total_ctc_loss(ctc, lengths, *labels, model.blank)
        per_label = per_label + config.ctc_weight * total_ctc / ctc_labels.clamp(min=1)
    return TrainingLoss(per_label, joint)


class BatchLoss(nn.Module):
    """`training_loss` as a module, since DDP wraps the forward pass of a module.

    Args:
        model: The model to train.
        config: Settings of the run.
    """

    def __init__(self, model: Model, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.graphs = StepGraphs(model) if config.graphs else None

    def forward(self, batch: Prepared, step_labels: Tensor) -> TrainingLoss:
        """`training_loss` of one batch of a step."""
        return training_loss(self.model, batch, self.config, step_labels, self.graphs)


def attention_loss(
    model: AEDModel,
    encoded: Tensor,
    lengths: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    smoothing: float,
) -> Tensor:
    """Cross-entropy of labels and eos summed over the batch, in nats: a scalar.

    The decoder's inputs are bos and the labels before each position (teacher forcing).

    Args:
        model: Model whose decoder is trained.
        encoded: Frames (B, T, D) of `model.encode`.
        lengths: Valid frames (B,), on the frames' device or the host.
        targets: Labels (B, U), on any device; those after `target_lengths` have no influence.
        target_lengths: Labels of each utterance (B,).
        smoothing: Share of a target's probability that the other V - 1 tokens get in equal parts,
            as in NeMo. torch's `cross_entropy` spreads its share over all V tokens, so its
            `label_smoothing` is V / (V - 1) times as large.
    """
    is_label = valid_mask(target_lengths, targets.shape[1])
    texts = targets.where(is_label, model.config.pad)
    inputs = F.pad(texts, (1, 0), value=model.bos)  # (B, U1)
    outputs = F.pad(targets.where(is_label, IGNORED), (0, 1), value=IGNORED)  # (B, U1)
    outputs.scatter_(1, target_lengths[:, None].to(outputs.device), model.eos)
    outputs = to_device(outputs, encoded.device)
    logits = model.logits(encoded, lengths, to_device(inputs, encoded.device))  # (B, U1, V)
    V = logits.shape[2]
    with autocast(logits.device.type):
        return F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            outputs.flatten(),
            ignore_index=IGNORED,
            label_smoothing=smoothing * V / (V - 1),
            reduction="sum",
        )


def total_ctc_loss(
    log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int
) -> Tensor:
    """CTC loss summed over the batch, in nats; 0 for utterances without an alignment.

    torch's kernel computes it on a CPU. Elsewhere asrkit's recursion does, without waiting for the
    device.

    Args:
        log_probs: Log-probabilities of the CTC head, (B, T, V), float32 at least.
        lengths: Encoder frames of each utterance (B,).
        targets: Labels (B, U).
        target_lengths: Labels of each utterance (B,).
        blank: Index of blank.
    """
    if log_probs.device.type != "cpu":
        return ctc_loss(log_probs, targets, lengths, target_lengths, blank).sum()
    return F.ctc_loss(
        log_probs.transpose(0, 1),  # (T, B, V)
        targets,
        lengths,
        target_lengths,
        blank,
        reduction="sum",
        zero_infinity=True,
    )


def transducer_loss(
    model: TransducerModel,
    encoded: Tensor,
    predicted: Tensor,
    lengths: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    config: TrainConfig,
    fits: Tensor,
) -> tuple[Tensor, str]:
    """Loss of RNN-T or TDT summed over the batch, in nats, and the form of the joint.

    Args:
        model: Model whose joint is trained.
        encoded: Projected frames (B, T, D).
        predicted: Projected predictions (B, U1, D).
        lengths: Encoder frames of each utterance (B,).
        targets: Labels (B, U).
        target_lengths: Labels of each utterance (B,).
        config: Settings `joint`, `sigma` and `omega`.
        fits: Which utterances count, bool (B,).
    """
    alignment = (targets.int(), lengths.int(), target_lengths.int())
    options: dict[str, Any] = {"reduction": "none"}
    full_loss: Any = rnnt_loss
    lean_loss: Any = rnnt_loss_lean
    if model.durations:
        options |= {"durations": model.durations, "sigma": config.sigma, "omega": config.omega}
        full_loss = tdt_loss
        lean_loss = tdt_loss_lean
    hidden_layer: dict[str, Any] = {
        "activation": model.config.activation,
        "dropout": model.dropout.p if model.dropout.training else 0.0,
    }

    def join(encoded: Tensor, predicted: Tensor) -> Tensor:
        return model.join(encoded[:, :, None], predicted[:, None])  # (B, T, U1, V)

    def loss(logits: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        with autocast(logits.device.type):
            return full_loss(logits, *rest, **options)

    joint, size = _joint_and_size(model, encoded, predicted, config)
    halves = (encoded, predicted)
    if joint == "lean":
        output = (model.output.weight, model.output.bias)
        costs = lean_loss(*halves, *output, *alignment, **hidden_layer, **options)
    elif joint == "packed":
        full_loss = rnnt_loss_packed
        hidden = pack_joint(*halves, *alignment[1:], **hidden_layer)  # (N, D)
        costs = loss(model.output(hidden), *alignment, overwrite_logits=True, **options)
    else:
        options["overwrite_logits"] = _is_plain(model)  # nothing else reads a linear layer's output
        costs = split_batches(join, *halves, *alignment, size=size, loss=loss, **options)
    return costs.where(to_device(fits, costs.device), 0).sum(), joint


def _joint_and_size(
    model: TransducerModel, encoded: Tensor, predicted: Tensor, config: TrainConfig
) -> tuple[str, int]:
    """The form of the joint, and the utterances for which it is computed at once."""
    B, T, D = encoded.shape
    joint: str = config.joint
    plain = _is_plain(model)
    if joint in ("lean", "packed"):
        remedy = "Pass joint='full' or joint='auto'."
        wanted = f"an unmodified TransducerModel with {joint!r}"
        expect(plain, "joint", wanted, "another", remedy)
        _expect_packable(joint, model.durations)
    gpu_bytes = None
    if encoded.is_cuda:
        gpu_bytes = torch.cuda.get_device_properties(encoded.device).total_memory
    V = model.config.vocab_size + 1 + len(model.durations)
    shape: Any = {"T": T, "U1": predicted.shape[1], "V": V, "D": D, "dtype": encoded.dtype}
    if joint == "auto":
        joint = "lean" if plain and chooses_lean(B=B, gpu_bytes=gpu_bytes, **shape) else "full"
    if joint == "split":
        most = PAGED_BYTES if gpu_bytes is None else SPLIT_SHARE * gpu_bytes
        return joint, max(1, int(most // joint_peak_bytes(B=1, **shape)))
    return joint, B


def _expect_packable(joint: str, durations: Sequence[int]) -> None:
    fits = joint != "packed" or not durations
    remedy = "Pass joint='lean', which computes no padding either."
    expect(fits, "joint", "another for a model with durations", repr(joint), remedy)


def _is_plain(model: TransducerModel) -> bool:
    """Whether the joint is output(dropout(activation(encoded + predicted))) with a linear output.

    The lean losses compute this formula without calling the modules.
    """
    return type(model) is TransducerModel and type(model.output) is nn.Linear


def chooses_lean(
    *, B: int, T: int, U1: int, V: int, D: int, dtype: torch.dtype, gpu_bytes: int | None
) -> bool:
    """Whether joint="auto" uses the lean loss for a batch of this shape.

    On a GPU it does in half precision, and where the full joint would fill more than half of the
    memory. An H100 took 11.7 ms in bfloat16 for a batch of (32, 200, 101) with D 640 and V 1025,
    against 33.9 ms with the joint; in float32 90 ms, against 66 ms (docs/benchmarks.md).

    On a CPU it does where the lean loss is about as fast or faster. It costs a product of D V
    operations a node and saves memory traffic of about D + V numbers a node, so it pays while
    D V / (D + V) is small. It also pays where the joint is so large (128 MiB) that the system maps
    new pages for it at each step.

    Time of joint and loss, full / lean, forward and backward, medians of 4 to 5 interleaved rounds
    on one core of an AMD EPYC with AVX-512 BF16, tanh (the benchmark suite "training" measures
    whole steps). The joint kept its logits in these runs; overwriting them, as here, is up to a
    fifth faster below 10,000 nodes and as fast above:

        D V / (D + V)   D, V        nodes    float32   bfloat16
         24             128, 29      4,200      1.61       1.14
         64             128, 128     4,200      0.91       1.00
        114             128, 1025    4,200      1.35       1.30
        124             128, 4097    4,200      1.05       1.15
        205             256, 1025    4,200      1.05       1.03
        205             256, 1025   48,000      1.48       1.28
        256             512, 512     8,000      0.98       0.98
        256             512, 512    60,000      1.12       1.19
        394             640, 1025    8,000      1.03       0.95
        394             640, 1025   16,000      1.05       0.95
        394             640, 1025   60,000      1.13       1.23
        512             1024, 1025   8,000      0.91       0.90
        512             1024, 1025  60,000      1.57       1.19

    Args:
        B: Utterances.
        T: Encoder frames.
        U1: Lattice rows, labels + 1.
        V: Outputs of the joint: tokens with blank, and durations.
        D: Width of the joint.
        dtype: Type of the logits.
        gpu_bytes: Total memory of the GPU; None on a CPU. Free memory would make the choice, and
            so a resumed run, a matter of chance.
    """
    size = joint_peak_bytes(B=B, T=T, U1=U1, V=V, D=D, dtype=dtype)
    if gpu_bytes is not None:
        return dtype in HALF or size > MEMORY_SHARE * gpu_bytes
    return D * V <= PRODUCT_WIDTH * (D + V) or size >= PAGED_BYTES


def joint_peak_bytes(*, B: int, T: int, U1: int, V: int, D: int, dtype: torch.dtype) -> int:
    """Bytes that the full joint takes at the peak of a training step, padding included.

    The peak is one of two moments: the gradient of the logits, which overwrites them, with the
    hidden layer and its gradient; or the hidden layer, its gradient and that of the sum before it.
    Letters and `dtype` are those of `chooses_lean`.

    >>> joint_peak_bytes(B=1, T=2000, U1=101, V=1024, D=640, dtype=torch.float32)
    1861632000
    """
    nodes = B * T * U1
    return nodes * dtype.itemsize * max(V + 2 * D, 3 * D)
