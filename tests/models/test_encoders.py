import pytest
import torch

from asrkit.models import (
    ConvConfig,
    ConvEncoder,
    FastConformer,
    FastConformerConfig,
    LSTMEncoder,
    LSTMEncoderConfig,
)

ENCODERS = {
    "conv": lambda s: ConvEncoder(ConvConfig(width=16, layers=3, subsampling=s)),
    "fastconformer": lambda s: FastConformer(
        FastConformerConfig(
            width=16, layers=2, heads=2, subsampling=s, subsampling_channels=4
        )
    ),
    "lstm": lambda s: LSTMEncoder(
        LSTMEncoderConfig(width=16, before=1, after=1, stack_input=s // 2, phases=3)
    ),
}


def build(name: str, subsampling: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    encoder = ENCODERS[name](subsampling)
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            torch.nn.init.normal_(module.bias)
            module.running_mean.normal_()
    return encoder.eval()


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("subsampling", [2, 4, 8])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 63])
def test_lengths_are_the_frames_that_come_out(name, subsampling, T):
    encoded, lengths = build(name, subsampling)(
        torch.randn(2, T, 80), torch.tensor([T, 1])
    )
    assert encoded.shape == (2, -(-T // subsampling), 16)
    assert lengths.tolist() == [-(-T // subsampling), 1]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("filler", [5.0, float("nan"), float("inf")])
def test_what_lies_in_the_padding_cannot_matter(name, filler):
    encoder, features = build(name), torch.randn(4, 50, 80)
    lengths = torch.tensor([50, 33, 1, 8])
    for b, length in enumerate(lengths.tolist()):
        features[b, length:] = filler
    encoded, out = encoder(features, lengths)
    for b, length in enumerate(lengths.tolist()):
        alone, _ = encoder(features[b : b + 1, :length], lengths[b : b + 1])
        torch.testing.assert_close(encoded[b, : out[b]], alone[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_parameter_gets_a_gradient(name):
    encoder = build(name).train()
    encoder(torch.randn(2, 40, 80), torch.tensor([40, 30]))[0].square().sum().backward()
    assert [n for n, p in encoder.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConvConfig(subsampling=3), "subsampling: expected 2, 4 or 8, got 3"),
        (
            lambda: FastConformerConfig(heads=5),
            "heads: expected a divisor of width=144",
        ),
        (
            lambda: build("conv")(torch.zeros(1, 9, 79), torch.tensor([9])),
            r"features: expected shape \(B, T, F=80\)",
        ),
        (
            lambda: build("conv")(torch.zeros(2, 9, 80), torch.tensor([9])),
            r"lengths: expected shape \(B=2\)",
        ),
    ],
)
def test_contradictions_fail_at_birth(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_fastconformer_survives_an_autocast_that_keeps_layer_norm_in_float32(
    monkeypatch,
):
    plain = (
        torch.nn.LayerNorm.forward
    )  # as CUDA's autocast does; the CPU's keeps bfloat16
    monkeypatch.setattr(
        torch.nn.LayerNorm, "forward", lambda self, x: plain(self, x).float()
    )
    with torch.autocast("cpu", torch.bfloat16):
        encoded, _ = build("fastconformer")(
            torch.randn(2, 20, 80), torch.tensor([20, 9])
        )
    assert encoded.isfinite().all()
