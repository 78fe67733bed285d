"""Operations and parameters of encoders against torch's counters."""

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


def counted(encoder, *given):
    """Operations by torch's counter, which does not see a CPU's fused attention."""
    plain = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
    with torch.inference_mode(), plain, FlopCounterMode(display=False) as counter:
        encoder(*given)
    return counter.get_total_flops()


@pytest.mark.parametrize("B, T", [(2, 200), (1, 333), (3, 1)])
@pytest.mark.parametrize("changed", ENCODERS, ids=str)
def test_operations_of_a_fastconformer_agree_with_torchs_counter(changed, B, T):
    sizes = {"width": 32, "layers": 2, "subsampling_channels": 16, **changed}
    config = FastConformerConfig(**sizes)
    features = torch.randn(B, T, config.bins)
    lengths = torch.full((B,), T)
    found = counted(FastConformer(config).eval(), features, lengths)
    assert encoder_flops(config, B=B, T=T) == found


@pytest.mark.parametrize("T", [1, 20, 24])
@pytest.mark.parametrize(
    "changed", [{}, {"before": 1, "after": 1}, {"stack_input": 1, "stack": 3}]
)
def test_operations_of_an_lstm_encoder_agree_with_torchs_counter(changed, T):
    sizes = {"bins": 8, "width": 12, "before": 2, "after": 3, **changed}
    config = LSTMEncoderConfig(**sizes)
    # in float64, since the counter does not see a CPU's fused LSTM
    features = torch.randn(2, T, 8, dtype=torch.float64)
    found = counted(LSTMEncoder(config).double(), features, torch.full((2,), T))
    assert encoder_flops(config, B=2, T=T) == found


STAGES = (
    Stage(channels=6, kernel=5, repeat=1, stride=2, dense=False),
    Stage(channels=6, kernel=3, repeat=2),
    Stage(channels=4, kernel=3, repeat=3),
    Stage(channels=5, kernel=3, repeat=1, dilation=2, dense=False),
)


@pytest.mark.parametrize("T", [1, 2, 17, 40])
@pytest.mark.parametrize("dense", [{}, {"dense": False}])
def test_operations_of_a_jasper_agree_with_torchs_counter(dense, T):
    stages = [replace(stage, **dense) for stage in STAGES]
    config = JasperConfig(bins=8, stages=stages)
    features = torch.randn(3, T, 8)
    lengths = torch.full((3,), T)
    found = counted(Jasper(config).eval(), features, lengths)
    assert encoder_flops(config, B=3, T=T) == found


def test_the_weights_of_canarys_encoders_are_those_of_the_claims():
    claims = {claim.id: claim for claim in load_claims()}
    presets_of = {"canary-883m": "canary_1b_flash", "canary-182m": "canary_180m_flash"}
    for name, preset in presets_of.items():
        config = presets.PRESETS[preset]()
        assert encoder_parameters(config.encoder) == claims[name].params["encoder"]
