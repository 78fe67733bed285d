"""What a training step minimises: the transducer loss, and an auxiliary CTC loss beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.losses import rnnt_loss, rnnt_loss_lean, tdt_loss, tdt_loss_lean
from asrkit.models import TransducerModel
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.joint import takes_lean


class TrainingLoss(NamedTuple):
    """Loss of a batch: a scalar in nats per label, and whether the lean loss computed it."""

    per_label: Tensor
    lean: bool


def training_loss(model: TransducerModel, batch: Prepared, config: TrainConfig) -> TrainingLoss:
    """Loss of a batch in nats per label: RNN-T, or TDT if the model has durations, plus CTC.

    The logits of a full joint go to the loss in the dtype they are computed in.

    Args:
        model: In training mode.
        batch: On any device.
        config: Precision, joint, `ctc_weight`, `sigma` and `omega`.

    Raises:
        ValueError: joint="lean" with a joint that the lean losses cannot express.
    """
    device = next(model.parameters()).device
    features, lengths, targets, target_lengths = (part.to(device) for part in batch[:4])
    dtype = config.dtype(device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        encoded, lengths, ctc = model.encode(features, lengths)
        predicted = model.rows(targets)
        total, lean = transducer_loss(
            model, encoded, predicted, targets, lengths, target_lengths, config
        )
    labels = target_lengths.sum().clamp(min=1)  # a batch of silence has none
    loss = total / labels
    if config.ctc_weight:
        auxiliary = F.ctc_loss(
            ctc.float().transpose(0, 1),  # (T, B, V)
            targets,
            lengths,
            target_lengths,
            model.blank,
            reduction="sum",
            zero_infinity=True,
        )
        loss = loss + config.ctc_weight * auxiliary / labels
    return TrainingLoss(loss, lean)


def transducer_loss(
    model: TransducerModel,
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    lengths: Tensor,
    target_lengths: Tensor,
    config: TrainConfig,
) -> tuple[Tensor, bool]:
    """Transducer loss summed over the batch, in nats, and whether the lean loss computed it.

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
        with torch.autocast(logits.device.type, enabled=False):
            return full_loss(logits, *alignment, **options), False
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
    return total, True


def compile_losses(model: TransducerModel, config: TrainConfig) -> None:
    """Run the losses that training will call on one lattice node, so that they are compiled.

    The first training on a machine waits some ten seconds for each, before its clock starts.
    """
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
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            total, _ = transducer_loss(model, encoded, encoded, no_labels, one, one - 1, settings)
        total.backward()
    model.zero_grad(set_to_none=True)
