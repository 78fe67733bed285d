"""Models whose linear layers and LSTMs a quantizer has replaced: they are recognised with as before."""

import pytest
import torch
from torch import nn

from asrkit.models import (
    AEDConfig,
    AEDModel,
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    LSTMConfig,
    LSTMEncoderConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.models.encoders import dtype_of
from asrkit.transcribe import PipelineConfig, Recognizer
from asrkit.transcribe.recognizer import device_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch.ao moves to torchao
CONFORMER = FastConformerConfig(width=32, layers=2, heads=2, subsampling_channels=8)
LSTM = LSTMEncoderConfig(width=32, before=1, after=1)
AED = {
    "vocab_size": 31,
    "encoder": CONFORMER,
    "width": 32,
    "layers": 1,
    "heads": 2,
    "most": 16,
}
MODELS = {
    "ctc conformer": lambda: CTCModel(CTCConfig(vocab_size=28, encoder=CONFORMER)),
    "rnnt conformer": lambda: TransducerModel(
        TransducerConfig(
            vocab_size=28, encoder=CONFORMER, predictor=LSTMConfig(width=24, layers=2)
        )
    ),
    "tdt lstm": lambda: TransducerModel(
        TransducerConfig(vocab_size=28, encoder=LSTM, durations=(0, 1, 2))
    ),
    "aed conformer": lambda: AEDModel(AEDConfig(bos=1, eos=2, pad=0, **AED)),
}


def made(kind):
    torch.manual_seed(0)
    return MODELS[kind]().eval().requires_grad_(False)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("form", ["eager", "optimized"])
def test_a_model_with_replaced_layers_is_recognised_with(kind, form):
    plain = made(kind)
    replaced = torch.ao.quantization.quantize_dynamic(
        plain, {nn.Linear, nn.LSTM}, torch.qint8
    )
    assert not any(
        type(part) is nn.Linear and type(part.weight) is nn.Parameter
        for part in replaced.encoder.modules()
    )
    assert (dtype_of(replaced), device_of(replaced).type) == (torch.float32, "cpu")
    noise = 0.1 * torch.randn(3, 24_000, generator=torch.Generator().manual_seed(1))
    speech = noise, torch.tensor([24_000, 15_000, 700])
    config = PipelineConfig(encoder=form, max_symbols=3)
    before = Recognizer(plain, config)
    after = Recognizer(replaced, config)
    wanted, ends = before.encode(*before.features(*speech))
    found, steps = after.encode(*after.features(*speech))
    assert torch.equal(steps, ends) and found.dtype == torch.float32
    assert (found - wanted).norm() <= 0.1 * wanted.norm()
    hypotheses = after.decode(found, steps)
    assert hypotheses.scores.isfinite().all()
    assert len(hypotheses.tokens()) == 3


def test_a_model_without_weights_is_float32_on_the_cpu():
    assert dtype_of(nn.Identity()) == torch.float32
    assert device_of(nn.Identity()) == torch.device("cpu")
    layer = nn.Linear(2, 2).to(torch.bfloat16)
    layer.weight = nn.Parameter(
        torch.zeros(2, 2, dtype=torch.int8), requires_grad=False
    )
    assert dtype_of(layer) == torch.bfloat16
