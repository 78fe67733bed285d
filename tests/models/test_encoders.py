"""Properties of every encoder: frames as its lengths, no influence of the padding, gradients, no wait for a device."""

import pytest
import torch
from torch import nn

from asrkit.models import (
    ConvConfig,
    FastConformerConfig,
    JasperConfig,
    LSTMEncoderConfig,
    Stage,
    WhisperEncoderConfig,
)
from asrkit.models.encoders import make_encoder
from asrkit.workbench.measure import host_reads

SIZES = {"bins": 20, "width": 16}
FAST = {**SIZES, "layers": 2, "heads": 2, "subsampling_channels": 4}
STRIDE = Stage(channels=12, kernel=5, repeat=1, stride=2, dense=False)
DENSE = Stage(channels=16, kernel=3, repeat=2)
CONFIGS = {
    "conv": ConvConfig(**SIZES, layers=3),
    "conv of 8": ConvConfig(**SIZES, layers=1, subsampling=8),
    "fastconformer": FastConformerConfig(**FAST, subsampling=2),
    "fastconformer of 4": FastConformerConfig(**FAST, subsampling=4),
    "fastconformer of 8": FastConformerConfig(**FAST, subsampling=8, context=(2, 1)),
    "lstm": LSTMEncoderConfig(**SIZES, before=1, after=1, stack_input=2, phases=3),
    "lstm whole": LSTMEncoderConfig(**SIZES, before=2, after=1, phases=1),
    "jasper": JasperConfig(bins=20, stages=(STRIDE, DENSE, DENSE)),
    "whisper": WhisperEncoderConfig(**SIZES, layers=2, heads=2, most=40),
}
ENCODERS = pytest.mark.parametrize("name", CONFIGS)


def build(name):
    torch.manual_seed(0)
    encoder = make_encoder(CONFIGS[name])
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
    return encoder.double().eval()


@ENCODERS
def test_lengths_are_the_frames_that_come_out(name):
    encoder = build(name)
    subsampling = CONFIGS[name].subsampling
    for T in (1, 2, 7, 8, 9, 63):
        encoded, lengths = encoder(torch.randn(2, T, 20), torch.tensor([T, 1]))
        assert encoded.shape == (2, -(-T // subsampling), 16)
        assert lengths.tolist() == [-(-T // subsampling), 1]


@pytest.mark.parametrize("filler", [5.0, float("nan"), float("inf")])
@ENCODERS
def test_neither_padding_nor_the_rest_of_the_batch_matters(name, filler):
    encoder = build(name)
    features = torch.randn(5, 59, 20).double()
    lengths = torch.tensor([59, 33, 1, 8, 41])
    for b, length in enumerate(lengths):
        features[b, length:] = filler
    encoded, ends = encoder(features, lengths)
    for b, length in enumerate(lengths):
        alone, _ = encoder(features[b : b + 1, :length], lengths[b : b + 1])
        torch.testing.assert_close(encoded[b, : ends[b]], alone[0])
        assert name == "whisper" or not encoded[b, ends[b] :].any()


@ENCODERS
def test_every_parameter_gets_a_finite_gradient_whatever_is_in_the_padding(name):
    encoder = build(name).train()
    features = torch.randn(2, 40, 20).double()
    features[1, 29:] = torch.nan
    encoder(features, torch.tensor([40, 29]))[0].square().sum().backward()
    for parameter in encoder.parameters():
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("where", ["cpu", "meta"])
@ENCODERS
def test_a_step_reads_nothing_from_the_device(name, where):
    """Fake tensors take the place of a GPU's; lengths are there or on the host."""
    encoder = build(name).to("meta")
    features = torch.zeros(3, 40, 20, device="meta")
    lengths = torch.tensor([40, 31, 2]).to(where)

    def step():
        encoder(features, lengths)[0].sum().backward()

    assert host_reads(step, device="meta") == {}


def test_an_autocast_that_keeps_layer_norm_in_float32_is_survived(monkeypatch):
    plain = nn.LayerNorm.forward  # as CUDA's autocast does; the CPU's keeps bfloat16
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: plain(self, x).float())
    encoder = build("fastconformer").float()
    with torch.autocast("cpu", torch.bfloat16):
        encoded, _ = encoder(torch.randn(2, 20, 20), torch.tensor([20, 9]))
    assert encoded.isfinite().all()
