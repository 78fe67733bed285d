"""A recogniser with random weights, and one utterance for it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asrkit.models import (
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.transcribe.recognizer import Recognizer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ
from asrkit.workbench.lessons.shared.planted import planted, seeded
from asrkit.workbench.lessons.shared.variants import (
    one_thread,
)


@dataclass(frozen=True, kw_only=True)
class OneUtterance:
    """A recogniser with random weights, and one utterance of noise for it.

    Random weights would find far too many labels or none, so predictor and joint are planted ones
    (asrkit.workbench.lessons.shared.planted) with 3.5 labels a second in as many frames as the encoder
    gives. What it gives is computed, projected and not decoded.
    """

    model: TransducerModel
    wave: Tensor  # (1, S)
    planted_frames: Tensor  # (1, T, width), what is decoded
    labels: int  # in these frames

    def recognise(self, recognizer: Recognizer) -> tuple[Tensor, Tensor]:
        """Encoded frames (1, T, D) and labels (1, U), by one thread on one core.

        Args:
            recognizer: Of `model`, in any precision.
        """
        length = torch.tensor([self.wave.shape[1]])
        with one_thread():
            encoded, ends = recognizer.encode(*recognizer.features(self.wave, length))
            found = recognizer.decode(self.planted_frames.to(encoded.dtype), ends)
            return encoded, found.labels


def one_utterance(config: TransducerConfig, seconds: float) -> OneUtterance:
    """A recogniser with random weights, and noise for it.

    Args:
        config: Of the recogniser, with an LSTM predictor and an encoder frame for 8 feature frames.
        seconds: Of the noise.
    """
    assert isinstance(config.predictor, LSTMConfig)
    frames = math.ceil(round(100 * seconds) / 8)
    plan = planted(
        1, frames, V=config.vocab_size + 1, width=config.joint_width, layers=config.predictor.layers
    )
    samples = round(seconds * RATE_HZ)
    return OneUtterance(
        model=random_transducer(config, plan.model),
        wave=torch.randn(1, samples, generator=torch.Generator().manual_seed(0)) / 10,
        planted_frames=plan.encoded,
        labels=len(plan.labels[0]),
    )


def random_transducer(config: TransducerConfig, decoder: TransducerModel) -> TransducerModel:
    """A model of `config` with random weights, but predictor and joint of `decoder`."""
    model = seeded(TransducerModel, config)
    for part in ("predictor", "predictor_projection", "output"):
        getattr(model, part).load_state_dict(getattr(decoder, part).state_dict())
    return model
