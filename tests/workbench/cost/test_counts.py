"""Counted encoders against what torch counts."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from asrkit.models import (
    FastConformer,
    FastConformerConfig,
    Jasper,
    JasperConfig,
    LSTMEncoder,
    LSTMEncoderConfig,
    Stage,
    presets,
)
from asrkit.workbench.claims import load_claims
from asrkit.workbench.cost import encoder_flops, encoder_parameters

ENCODERS = [
    {}, {"subsampling": 4, "bins": 41}, {"bias": False, "kernel": 5, "expansion": 2, "heads": 2, "subsampling_channels": 24},
    {"context": (8, 8)}, {"context": (3, 1), "subsampling": 2}, {"context": (0, 0)}, {"context": (500, 3)}, {"context": (4, -1)},
]  # fmt: skip


@pytest.mark.parametrize("B, T", [(2, 200), (1, 333), (3, 1)])
@pytest.mark.parametrize("changed", ENCODERS, ids=str)
def test_operations_of_a_fastconformer_are_those_that_torch_counts(changed, B, T):
    sizes = {"width": 32, "layers": 2, "subsampling_channels": 16, **changed}
    config = FastConformerConfig(**sizes)
    encoder = FastConformer(config).eval()
    # the counter does not see a CPU's fused attention
    math = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
    with torch.inference_mode(), math, FlopCounterMode(display=False) as counter:
        encoder(torch.randn(B, T, config.bins), torch.full((B,), T))
    assert encoder_flops(config, B=B, T=T) == counter.get_total_flops()


@pytest.mark.parametrize("T", [1, 20, 24])
@pytest.mark.parametrize(
    "changed", [{}, {"before": 1, "after": 1}, {"stack_input": 1, "stack": 3}]
)
def test_operations_of_an_lstm_encoder_are_those_that_torch_counts(changed, T):
    config = LSTMEncoderConfig(
        **{"bins": 8, "width": 12, "before": 2, "after": 3, **changed}
    )
    # in float64, since the counter does not see a CPU's fused LSTM
    encoder = LSTMEncoder(config).double()
    features = torch.randn(2, T, 8, dtype=torch.float64)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        encoder(features, torch.full((2,), T))
    assert encoder_flops(config, B=2, T=T) == counter.get_total_flops()


class CountedConv(nn.Conv1d):
    """Adds two operations for each product of a weight to `total`."""

    total = 0

    def forward(self, x):
        y = super().forward(x)
        CountedConv.total += 2 * self.weight.numel() * y.shape[0] * y.shape[2]
        return y


STAGES = (
    Stage(channels=6, kernel=5, repeat=1, stride=2, dense=False),
    Stage(channels=6, kernel=3, repeat=2),
    Stage(channels=4, kernel=3, repeat=3),
    Stage(channels=5, kernel=3, repeat=1, dilation=2, dense=False),
)


@pytest.mark.parametrize("frames", [1, 2, 17, 40])
@pytest.mark.parametrize("dense", [{}, {"dense": False}])
def test_operations_of_a_jasper_are_those_of_its_convolutions(
    dense, frames, monkeypatch
):
    stages = [replace(stage, **dense) for stage in STAGES]
    config = JasperConfig(bins=8, stages=stages)
    monkeypatch.setattr(CountedConv, "total", 0)
    encoder = Jasper(config).eval()
    for part in encoder.modules():
        if isinstance(part, nn.Conv1d):
            part.__class__ = CountedConv
    with torch.inference_mode():
        encoder(torch.randn(3, frames, 8), torch.full((3,), frames))
    assert encoder_flops(config, B=3, T=frames) == CountedConv.total


def test_the_weights_of_canarys_encoders_are_those_of_the_claims():
    claims = {claim.id: claim for claim in load_claims()}
    for name, preset in (
        ("canary-883m", "canary_1b_flash"),
        ("canary-182m", "canary_180m_flash"),
    ):
        config = presets.PRESETS[preset]()
        assert encoder_parameters(config.encoder) == claims[name].params["encoder"]
