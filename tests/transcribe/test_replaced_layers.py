"""Models whose linear layers and LSTMs a quantizer has replaced are used like others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from asrkit.models import LSTMEncoderConfig, make_model, presets
from asrkit.models.common import dtype_of
from asrkit.transcribe import PipelineConfig, Recognizer
from asrkit.transcribe.recognizer import device_of

LSTM = LSTMEncoderConfig(width=32, before=1, after=1)
CONFIGS = {
    "tdt": presets.tiny(),
    "tdt of LSTMs": replace(presets.tiny(), encoder=LSTM),
    "aed": replace(presets.tiny_aed(), ctc=False),
}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor"
)  # to torchao
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("form", ["eager", "optimized"])
def test_a_model_with_replaced_layers_is_recognised_with(kind, form):
    torch.manual_seed(0)
    plain = make_model(CONFIGS[kind]).eval().requires_grad_(False)
    quantize = torch.ao.quantization.quantize_dynamic
    replaced = quantize(plain, {nn.Linear, nn.LSTM}, torch.qint8)
    assert not any(type(part) is nn.LSTM for part in replaced.modules())
    assert (dtype_of(replaced), device_of(replaced).type) == (torch.float32, "cpu")
    noise = 0.1 * torch.randn(3, 24_000), torch.tensor([24_000, 15_000, 700])
    config = PipelineConfig(encoder=form)
    notes = {"max_symbols": 3}
    before, after = (
        Recognizer(model, config, notes=notes) for model in (plain, replaced)
    )
    wanted, ends = before.encode(*before.features(*noise))
    found, steps = after.encode(*after.features(*noise))
    assert torch.equal(steps, ends)
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).norm() <= 0.1 * wanted.norm()
    assert after.decode(found, steps).scores.isfinite().all()
