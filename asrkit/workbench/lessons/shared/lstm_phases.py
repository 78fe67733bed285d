"""A training step of an LSTM encoder whose batch is computed in phases."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asrkit.models import LSTMEncoder, LSTMEncoderConfig
from asrkit.workbench.lessons.shared.planted import seeded


@dataclass(frozen=True)
class Batch:
    """Random features (B, T, F), their lengths (B,) on the CPU, and the gradient of the output."""

    features: Tensor
    lengths: Tensor
    gradient: Tensor


def random_encoder(config: LSTMEncoderConfig) -> LSTMEncoder:
    """An encoder with seeded random weights, in training mode, as cuDNN's backward pass needs."""
    return seeded(LSTMEncoder, config).requires_grad_().train()


def random_batch(encoder: LSTMEncoder, lengths: Tensor) -> Batch:
    """Noise of these lengths, on the device and in the dtype of the encoder."""
    weight = next(encoder.parameters())
    draw = torch.Generator().manual_seed(1)
    B = len(lengths)
    T = int(lengths.max())
    features = torch.randn(B, T, encoder.config.bins, generator=draw)
    encoded_T = -(-T // encoder.config.subsampling)
    gradient = torch.randn(B, encoded_T, encoder.width, generator=draw)
    return Batch(features.to(weight), lengths, gradient.to(weight))


def phased_step(encoder: LSTMEncoder, batch: Batch, count: int) -> tuple[Tensor, ...]:
    """Encoded frames and the gradients of all weights, computed in at most `count` phases."""
    encoder.config = replace(encoder.config, phases=count)
    encoder.zero_grad(set_to_none=True)
    encoded, _ = encoder(batch.features, batch.lengths)
    encoded.backward(batch.gradient)
    gradients = [weight.grad for weight in encoder.parameters() if weight.grad is not None]
    return (encoded.detach(), *gradients)
