"""What a training step minimises: one table from the kind of a model to its loss.

A transducer has its own loss and an auxiliary CTC loss beside it, a CTC model has CTC alone. A new
kind of model is one more line in `OBJECTIVES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.losses import ctc_loss, rnnt_loss, rnnt_loss_lean, tdt_loss, tdt_loss_lean
from asrkit.models import CTCConfig, CTCModel, TransducerConfig, TransducerModel
from asrkit.models.assembly import Model, ModelConfig
from asrkit.runtime import autocast, to_device
from asrkit.shapes import expect
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.joint import takes_lean


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
    # (model, config) to whether weights of the model have no gradient
    has_idle_weights: Callable[[Any, TrainConfig], bool]
    has_joint: bool  # which `TrainConfig.joint` is about


def training_loss(model: Model, batch: Prepared, config: TrainConfig) -> TrainingLoss:
    """Loss of a batch in nats per label: RNN-T or TDT plus CTC of a transducer, or CTC alone.

    A transducer has the loss of TDT if it has durations. The logits of a full joint go to the loss
    in the dtype they are computed in. Lengths and targets that lie on the host stay there for the
    checks, so that on a GPU nothing waits for the device.

    Args:
        model: In training mode.
        batch: On the host, where `prepare_batch` makes it, or on the model's device.
        config: Precision; for a transducer joint, `ctc_weight`, `sigma` and `omega` too.

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


def _check_ctc_head(model_config: TransducerConfig, config: TrainConfig) -> None:
    fits = model_config.ctc or config.ctc_weight == 0
    expect(fits, "ctc_weight", "0 for a model without a CTC head", config.ctc_weight)


def _check_nothing(model_config: object, config: TrainConfig) -> None:
    """For models that every `TrainConfig` fits."""


def _ctc_head_is_idle(model: TransducerModel, config: TrainConfig) -> bool:
    return not config.ctc_weight and model.ctc_head is not None


def _none_is_idle(model: nn.Module, config: TrainConfig) -> bool:
    return False


OBJECTIVES: dict[type[ModelConfig], Objective] = {
    TransducerConfig: Objective(
        loss=_transducer_and_ctc,
        compile=_compile_transducer_losses,
        check=_check_ctc_head,
        has_idle_weights=_ctc_head_is_idle,
        has_joint=True,
    ),
    CTCConfig: Objective(
        loss=_ctc_alone,
        compile=_compile_nothing,
        check=_check_nothing,
        has_idle_weights=_none_is_idle,
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
