"""A recogniser with random weights, and one utterance for it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.transcribe.recognizer import Recognizer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ
from asrkit.workbench.lessons.shared.planted import planted, seeded
from asrkit.workbench.lessons.shared.variants import one_thread


@dataclass(frozen=True, kw_only=True)
class OneUtterance:
    """A recogniser with random weights, and one utterance of noise for it.

    Random weights would emit far too many labels or none. So predictor and joint are planted
    (planted.py), and the decoder reads planted frames, as many as the encoder returns, with 3.5
    labels a second. The encoder's frames are computed and projected, but not decoded.
    """

    model: TransducerModel
    wave: Tensor  # (1, S)
    planted_frames: Tensor  # (1, T, width), decoded in place of the encoder's
    labels: int  # in these frames

    def recognise(self, recognizer: Recognizer) -> tuple[Tensor, Tensor]:
        """Encoded frames (1, T, D) and labels (1, U), on one thread of one core.

        Args:
            recognizer: recogniser of `model`, in any precision.
        """
        length = torch.tensor([self.wave.shape[1]])
        with one_thread():
            encoded, ends = recognizer.encode(*recognizer.features(self.wave, length))
            hypotheses = recognizer.decode(self.planted_frames.to(encoded.dtype), ends)
            return encoded, hypotheses.labels


def one_utterance(config: TransducerConfig, seconds: float) -> OneUtterance:
    """A recogniser with random weights, and noise for it.

    Args:
        config: config of the model, with an LSTM predictor and one encoder frame per 8 feature
            frames.
        seconds: length of the noise.
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
    """A model with random weights, except predictor and joint, which are copied from `decoder`."""
    model = seeded(TransducerModel, config)
    for part in ("predictor", "predictor_projection", "output"):
        getattr(model, part).load_state_dict(getattr(decoder, part).state_dict())
    return model
