"""Magnitudes that a number format has to represent."""

from types import SimpleNamespace

import torch

from asrkit.features import FeatureConfig
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.workbench.lessons import bf16_casting as lesson
from asrkit.workbench.lessons.shared.precision import Speech


def test_every_quantity_is_positive_and_without_padding():
    torch.manual_seed(0)
    model = TransducerModel(TransducerConfig(vocab_size=12)).eval()
    trained = SimpleNamespace(model=model, features={})
    waves = torch.randn(2, 16_000)
    waves[1, 8000:] = 1e6  # padding, which must not be seen
    speech = Speech(trained, waves, torch.tensor([16_000, 8000]), ["", ""])
    found = lesson.magnitudes(speech)
    assert [*found] == ["waveform", "power", "features", "weights", "activations"]
    assert min(part.min() for part in found.values()) > 0
    assert len(found["waveform"]) <= 24_000 and found["waveform"].max() < 10


def test_a_tone_has_its_power_at_its_frequency():
    config = FeatureConfig()
    seconds = torch.arange(16_000) / 16_000
    power = lesson.power_spectrum((2000 * torch.pi * seconds).sin()[None], config)
    assert int(power[0, 50].argmax()) == round(1000 * config.fft / 16_000)
