"""A training step of an LSTM encoder whose batch is computed in phases."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asrkit.models import (
    LSTMEncoder,
    LSTMEncoderConfig,
)


@dataclass(frozen=True)
class Speech:
    """Random features (B, T, F), their lengths (B,) on the host, and the gradient of the output."""

    features: Tensor
    lengths: Tensor
    gradient: Tensor


def random_encoder(config: LSTMEncoderConfig) -> LSTMEncoder:
    """An encoder with seeded random weights, in training mode: cuDNN has no other backward pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LSTMEncoder(config).train()


def make_speech(encoder: LSTMEncoder, lengths: Tensor) -> Speech:
    """Noise of these lengths where the encoder lies, in its dtype."""
    weight = next(encoder.parameters())
    draw = torch.Generator().manual_seed(1)
    B = len(lengths)
    T = int(lengths.max())
    features = torch.randn(B, T, encoder.config.bins, generator=draw)
    encoded_T = -(-T // encoder.config.subsampling)
    gradient = torch.randn(B, encoded_T, encoder.width, generator=draw)
    return Speech(features.to(weight), lengths, gradient.to(weight))


def phased_step(encoder: LSTMEncoder, speech: Speech, count: int) -> tuple[Tensor, ...]:
    """Encoded frames and the gradients of all weights, computed in at most `count` phases."""
    encoder.config = replace(encoder.config, phases=count)
    encoder.zero_grad(set_to_none=True)
    encoded, _ = encoder(speech.features, speech.lengths)
    encoded.backward(speech.gradient)
    gradients = [weight.grad for weight in encoder.parameters() if weight.grad is not None]
    return (encoded.detach(), *gradients)
