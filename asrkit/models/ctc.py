"""CTC models: an encoder and a linear layer; and a CTC head on the encoder of other models."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.models.common import expect_sizes
from asrkit.models.conv import ConvConfig
from asrkit.models.encoders import Encoder, EncoderConfig, make_encoder


@dataclass(frozen=True, kw_only=True)
class CTCConfig:
    """Sizes of a `CTCModel`.

    Args:
        vocab_size: Tokens without blank. Blank is the last index, and V = vocab_size + 1.
        encoder: Sizes of the encoder.
    """

    vocab_size: int
    encoder: EncoderConfig = field(default_factory=ConvConfig)

    def __post_init__(self) -> None:
        expect_sizes(self, "vocab_size")


class CTCModel(nn.Module):
    """An encoder and a linear layer to V = vocab_size + 1 classes."""

    def __init__(self, config: CTCConfig) -> None:
        super().__init__()
        self.config = config
        self.blank = config.vocab_size
        self.encoder = make_encoder(config.encoder)
        self.output = nn.Linear(self.encoder.width, config.vocab_size + 1)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of every encoded frame.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64.

        Returns:
            Log-probabilities (B, T', V) and their lengths (B,).
        """
        encoded, lengths = self.encoder(features, lengths)
        return log_probs(self.output(encoded)), lengths


class EncodingModel(nn.Module):
    """What transducers and encoder-decoder models share: an encoder and an optional CTC head."""

    encoder: Encoder
    encoder_projection: Any
    ctc_head: nn.Linear | None

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode and project a batch of features.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64, on the features' device or the host.

        Returns:
            Projected frames (B, T', D); their lengths (B,), on the device of `lengths`; and
            log-probabilities of the CTC head (B, T', V), which are (B, T', 0) without a head.
        """
        encoded, lengths = self.encoder(features, lengths)
        if self.ctc_head is None:
            ctc = encoded.new_empty((*encoded.shape[:2], 0))
        else:
            ctc = log_probs(self.ctc_head(encoded))
        return self.encoder_projection(encoded), lengths, ctc


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities over the last dimension of `logits`, in float32 at least.

    In half precision the sum of a frame's V probabilities would have three digits.
    """
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
