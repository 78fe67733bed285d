"""What a training step minimises: one table from the kind of a model to its loss.

A transducer has its own loss and an auxiliary CTC loss beside it, an encoder-decoder model has
cross-entropy and CTC, a CTC model has CTC alone. A new kind of model is one more line in
`OBJECTIVES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.decoders.attention.protocol import Prompt, prompt_of
from asrkit.losses import ctc_loss, rnnt_loss, rnnt_loss_lean, tdt_loss, tdt_loss_lean
from asrkit.models import (
    AEDConfig,
    AEDModel,
    CTCConfig,
    CTCModel,
    TransducerConfig,
    TransducerModel,
)
from asrkit.models.presets import Model, ModelConfig
from asrkit.runtime import autocast, to_device
from asrkit.shapes import dims, expect, valid_mask
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig, check_smoothing
from asrkit.training.joint import takes_lean

IGNORED = -100  # in the targets of cross-entropy: counts as nothing


class TrainingLoss(NamedTuple):
    """Loss of a batch: a scalar in nats per label, and whether the lean loss computed it."""

    per_label: Tensor
    lean: bool


class TransducerLoss(NamedTuple):
    """Loss of a batch: a scalar in nats, its sum, and whether the lean loss computed it."""

    total: Tensor
    lean: bool


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What models of one kind minimise in training."""

    # (model, batch, config) to the loss of the batch
    loss: Callable[[Any, Prepared, TrainConfig], TrainingLoss]
    # (model, config): runs what `loss` compiles, on one lattice node
    compile: Callable[[Any, TrainConfig], None]
    # (config of the model, config): ValueError where one does not fit the other
    check: Callable[[Any, TrainConfig], None]
    # (config of the model, tokens of the tokenizer): ValueError where the two do not fit
    check_vocabulary: Callable[[Any, int], None]
    # (config of the model) to the most labels of a text; math.inf for no limit
    most_labels: Callable[[Any], float]
    has_joint: bool  # which `TrainConfig.joint` is about


def training_loss(model: Model, batch: Prepared, config: TrainConfig) -> TrainingLoss:
    """Loss of a batch in nats per label: a transducer's or a decoder's plus CTC, or CTC alone.

    A transducer has the loss of RNN-T, or of TDT if it has durations. The logits of a full joint go
    to the loss in the dtype they are computed in. An encoder-decoder model has the cross-entropy of
    labels and eos, `attention_loss`. Lengths and targets that lie on the host stay there for the
    checks, so that on a GPU nothing waits for the device.

    Args:
        model: In training mode.
        batch: On the host, where `prepare_batch` makes it, or on the model's device.
        config: Precision; for a transducer joint, `ctc_weight`, `sigma` and `omega` too, for an
            encoder-decoder model `ctc_weight` and `smoothing`.

    Raises:
        ValueError: joint="lean" with a joint that the lean losses cannot express.
    """
    return objective_of(model.config).loss(model, batch, config)


def compile_losses(model: Model, config: TrainConfig) -> None:
    """Run the losses that training will call on one lattice node, so that they are compiled.

    The first training of a transducer on a machine waits some ten seconds for each, before its
    clock starts. For CTC nothing is compiled.
    """
    objective_of(model.config).compile(model, config)


def _transducer_and_ctc(
    model: TransducerModel, batch: Prepared, config: TrainConfig
) -> TrainingLoss:
    device = next(model.parameters()).device
    features = to_device(batch.features, device)
    targets = batch.targets
    target_lengths = batch.target_lengths
    with autocast(device.type, config.dtype(device)):
        encoded, lengths, ctc = model.encode(features, batch.lengths)
        predicted = model.rows(to_device(targets, device))
        transducer = transducer_loss(
            model, encoded, predicted, targets, lengths, target_lengths, config
        )
    labels = target_lengths.sum().clamp(min=1)  # a batch of silence has none
    loss = transducer.total / labels
    if config.ctc_weight:
        auxiliary = total_ctc_loss(ctc.float(), targets, lengths, target_lengths, model.blank)
        loss = loss + config.ctc_weight * auxiliary / labels
    return TrainingLoss(loss, transducer.lean)


def _ctc_alone(model: CTCModel, batch: Prepared, config: TrainConfig) -> TrainingLoss:
    device = next(model.parameters()).device
    features = to_device(batch.features, device)
    with autocast(device.type, config.dtype(device)):
        log_probs, lengths = model(features, batch.lengths)  # float32 at least
    total = total_ctc_loss(log_probs, batch.targets, lengths, batch.target_lengths, model.blank)
    labels = batch.target_lengths.sum().clamp(min=1)  # a batch of silence has none
    return TrainingLoss(total / labels, lean=False)


def _attention_and_ctc(model: AEDModel, batch: Prepared, config: TrainConfig) -> TrainingLoss:
    device = next(model.parameters()).device
    features = to_device(batch.features, device)
    targets = batch.targets
    target_lengths = batch.target_lengths
    with autocast(device.type, config.dtype(device)):
        encoded, lengths, ctc = model.encode(features, batch.lengths)
        total = attention_loss(
            model, encoded, lengths, targets, target_lengths, smoothing=config.smoothing
        )
    labels = target_lengths.sum().clamp(min=1)  # a batch of silence has none
    loss = total / labels
    if config.ctc_weight:
        wide = ctc.to(torch.promote_types(ctc.dtype, torch.float32))
        auxiliary = total_ctc_loss(wide, targets, lengths, target_lengths, model.blank)
        loss = loss + config.ctc_weight * auxiliary / labels
    return TrainingLoss(loss, lean=False)


def attention_loss(
    model: AEDModel,
    encoded: Tensor,
    lengths: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    *,
    prompt: Prompt | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of labels and eos summed over the batch, in nats: a scalar.

    The decoder is given the right tokens so far (teacher forcing). The prompt is given to it, and
    is no target.

    Args:
        model: Whose decoder is trained.
        encoded: Frames (B, T, D) of `model.encode`.
        lengths: Valid frames (B,), on the frames' device or the host.
        targets: Labels (B, U), on any device; what lies behind `target_lengths` has no influence.
        target_lengths: Labels of each utterance (B,).
        prompt: Tokens before the text, (P,) for all or (B, P); None is `model.bos` alone.
        smoothing: Share, up to 0.5, of a target's probability that the other V - 1 tokens get,
            evenly, as in NeMo. In torch's `cross_entropy` the right token has a part in what is
            shared out, so its `label_smoothing` is V / (V - 1) times as large.

    Raises:
        ValueError: An argument does not fit, or prompt and labels are more than the model's `most`
            tokens. Values of tensors on a GPU are not looked at, since that would wait for it.
    """
    is_model = isinstance(model, AEDModel)
    expect(is_model, "model", "an AEDModel", type(model).__name__)
    check_smoothing(smoothing)
    B, _, _ = dims(encoded, "B T D", "encoded", D=model.config.width)
    _check_lengths("lengths", lengths, encoded)
    _, U = dims(targets, "B U", "targets", B=B)
    _check_lengths("target_lengths", target_lengths, targets)
    is_label = valid_mask(target_lengths, U)
    _check_labels(targets, is_label, model.vocab_size)
    targets = targets.long()
    before = prompt_of(model, prompt, targets)
    P = before.shape[1]
    texts = targets.where(is_label, model.config.pad)
    given = to_device(torch.cat([before, texts], 1), encoded.device)
    wanted = F.pad(targets.where(is_label, IGNORED), (0, 1), value=IGNORED)  # (B, U1)
    wanted.scatter_(1, target_lengths[:, None].long().to(wanted.device), model.eos)
    wanted = to_device(wanted, encoded.device)
    logits = model.logits(encoded, lengths, given)[:, P - 1 :]  # (B, U1, V)
    V = logits.shape[2]
    with autocast(logits.device.type):
        return F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            wanted.flatten(),
            ignore_index=IGNORED,
            label_smoothing=smoothing * V / (V - 1),
            reduction="sum",
        )


def _check_lengths(name: str, lengths: Tensor, data: Tensor) -> None:
    """ValueError unless lengths (B,) are whole numbers, on a CPU those within data (B, N, ...)."""
    B, N = data.shape[:2]
    dims(lengths, "B", name, B=B)
    expect(B > 0, name, "at least one utterance", "none")
    whole_numbers = lengths.dtype in (torch.int32, torch.int64)
    expect(whole_numbers, name, "int32 or int64", lengths.dtype)
    if lengths.is_cpu:
        low, high = (int(bound) for bound in lengths.aminmax())
        expect(0 <= low <= high <= N, name, f"0 to {N}", f"{low} to {high}")


def _check_labels(targets: Tensor, is_label: Tensor, V: int) -> None:
    """ValueError unless targets (B, U) are whole numbers, on a CPU tokens below V."""
    whole_numbers = targets.dtype in (torch.int32, torch.int64)
    expect(whole_numbers, "targets", "int32 or int64", targets.dtype)
    if targets.is_cpu and is_label.is_cpu:
        labels = targets[is_label]
        inside = bool(((labels >= 0) & (labels < V)).all())
        expect(inside, "targets", f"tokens from 0 to below V={V}", "others")


def total_ctc_loss(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int
) -> Tensor:
    """CTC loss summed over the batch, in nats; 0 for utterances that no alignment fits.

    On a CPU torch's kernel computes it, elsewhere the recursion that waits for no device.

    Args:
        log_probs: Of the CTC head, (B, T, V), float32.
        targets: Labels (B, U).
        lengths: Encoder frames of each utterance (B,).
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
    targets: Tensor,
    lengths: Tensor,
    target_lengths: Tensor,
    config: TrainConfig,
) -> TransducerLoss:
    """Transducer loss summed over the batch, in nats.

    Args:
        model: Whose joint is taken.
        encoded: Projected frames (B, T, D).
        predicted: Projected predictions of all lattice rows (B, U1, D).
        targets: Labels (B, U).
        lengths: Encoder frames of each utterance (B,).
        target_lengths: Labels of each utterance (B,).
        config: Its `joint`, `sigma` and `omega`.
    """
    B, T, _ = encoded.shape
    U1 = predicted.shape[1]
    lean = takes_lean(model, config, B=B, T=T, U1=U1, dtype=encoded.dtype, device=encoded.device)
    alignment = (targets.int(), lengths.int(), target_lengths.int())
    options: dict[str, Any] = {"reduction": "sum"}
    if model.durations:
        options |= {
            "durations": model.durations,
            "sigma": config.sigma,
            "omega": config.omega,
        }
    full_loss: Callable[..., Tensor] = rnnt_loss
    lean_loss: Callable[..., Tensor] = rnnt_loss_lean
    if model.durations:
        full_loss = tdt_loss
        lean_loss = tdt_loss_lean
    if not lean:
        logits = model.join(encoded[:, :, None], predicted[:, None])  # (B, T, U1, V)
        with autocast(logits.device.type):
            return TransducerLoss(full_loss(logits, *alignment, **options), lean)
    dropout = 0.0
    if model.dropout.training:
        dropout = model.dropout.p
    activation = "relu"
    if model.activation is torch.tanh:
        activation = "tanh"
    total = lean_loss(
        encoded,
        predicted,
        model.output.weight,
        model.output.bias,
        *alignment,
        activation=activation,
        dropout=dropout,
        **options,
    )
    return TransducerLoss(total, lean)


def _compile_transducer_losses(model: TransducerModel, config: TrainConfig) -> None:
    device = next(model.parameters()).device
    dtype = config.dtype(device)
    D = model.encoder_projection.out_features
    encoded = torch.zeros(1, 1, D, device=device, dtype=dtype, requires_grad=True)
    one = torch.ones(1, dtype=torch.int, device=device)
    no_labels = one[:, None][:, :0]
    omegas = [0.0]
    if model.durations:
        omegas.append(1.0)  # TDT takes the RNN-T loss then
    for omega in omegas:
        settings = replace(config, omega=omega)
        with autocast(device.type, dtype):
            found = transducer_loss(model, encoded, encoded, no_labels, one, one - 1, settings)
        found.total.backward()
    model.zero_grad(set_to_none=True)


def _compile_nothing(model: nn.Module, config: TrainConfig) -> None:
    """For objectives whose parts are all torch's."""


def _check_ctc_head(model_config: TransducerConfig | AEDConfig, config: TrainConfig) -> None:
    fits = model_config.ctc or config.ctc_weight == 0
    expect(fits, "ctc_weight", "0 for a model without a CTC head", config.ctc_weight)


def _expect_vocabulary(model_config: TransducerConfig | CTCConfig, tokens: int) -> None:
    fits = tokens == model_config.vocab_size
    expect(fits, "vocab_size", str(tokens), model_config.vocab_size)


def _expect_text_beside_special_tokens(model_config: AEDConfig, tokens: int) -> None:
    special = (model_config.bos, model_config.eos, model_config.pad)
    remedy = "Put them behind the tokenizer's: vocab_size is 3 larger than the tokenizer's."
    wanted = f"tokens behind the tokenizer's {tokens}"
    expect(min(special) >= tokens, "bos, eos, pad", wanted, special, remedy)


def _any_number_of_labels(model_config: ModelConfig) -> float:
    return math.inf


def _labels_with_positions(model_config: AEDConfig) -> float:
    return model_config.most - 1  # bos has a position too


def _check_nothing(model_config: object, config: TrainConfig) -> None:
    """For models that every `TrainConfig` fits."""


OBJECTIVES: dict[type[ModelConfig], Objective] = {
    TransducerConfig: Objective(
        loss=_transducer_and_ctc,
        compile=_compile_transducer_losses,
        check=_check_ctc_head,
        check_vocabulary=_expect_vocabulary,
        most_labels=_any_number_of_labels,
        has_joint=True,
    ),
    CTCConfig: Objective(
        loss=_ctc_alone,
        compile=_compile_nothing,
        check=_check_nothing,
        check_vocabulary=_expect_vocabulary,
        most_labels=_any_number_of_labels,
        has_joint=False,
    ),
    AEDConfig: Objective(
        loss=_attention_and_ctc,
        compile=_compile_nothing,
        check=_check_ctc_head,
        check_vocabulary=_expect_text_beside_special_tokens,
        most_labels=_labels_with_positions,
        has_joint=False,
    ),
}


def objective_of(model_config: ModelConfig) -> Objective:
    """The entry of `OBJECTIVES` for models of this config.

    Args:
        model_config: Of the model.

    Raises:
        ValueError: It is of another type.
    """
    kind = type(model_config)
    names = " or ".join(each.__name__ for each in OBJECTIVES)
    expect(kind in OBJECTIVES, "model_config", names, kind.__name__)
    return OBJECTIVES[kind]
