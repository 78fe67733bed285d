"""Models whose linear layers and LSTMs a quantizer has replaced: they are recognised with as before."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.models import (
    AEDConfig,
    AEDModel,
    ConvConfig,
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    JasperConfig,
    LSTMConfig,
    LSTMEncoderConfig,
    Stage,
    TransducerConfig,
    TransducerModel,
)
from asrkit.models.dtypes import device_of, dtype_of, one_dtype
from asrkit.transcribe import PipelineConfig, Recognizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao moves to torchao
CONFORMER = FastConformerConfig(width=32, layers=2, heads=2, subsampling_channels=8)
LSTM = LSTMEncoderConfig(width=32, before=1, after=1)
JASPER = JasperConfig(
    bins=80, stages=(Stage(channels=24, kernel=5, repeat=1, stride=2, dense=False),)
)
AED = {"vocab_size": 31, "encoder": CONFORMER, "width": 32, "layers": 1, "heads": 2, "most": 16}
MODELS = {
    "ctc conformer": lambda: CTCModel(CTCConfig(vocab_size=28, encoder=CONFORMER)),
    "ctc lstm": lambda: CTCModel(CTCConfig(vocab_size=28, encoder=LSTM)),
    "ctc jasper": lambda: CTCModel(CTCConfig(vocab_size=28, encoder=JASPER)),
    "ctc convolutions": lambda: CTCModel(
        CTCConfig(vocab_size=28, encoder=ConvConfig(width=16, layers=1))
    ),
    "rnnt conformer": lambda: TransducerModel(
        TransducerConfig(vocab_size=28, encoder=CONFORMER, predictor=LSTMConfig(width=24, layers=2))
    ),
    "tdt lstm": lambda: TransducerModel(
        TransducerConfig(vocab_size=28, encoder=LSTM, durations=(0, 1, 2))
    ),
    "aed conformer": lambda: AEDModel(AEDConfig(bos=1, eos=2, pad=0, **AED)),
}


class Int8WeightOnly(nn.Module):
    """A linear layer as quantizers leave it whose weights are parameters of whole numbers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        values = (linear.weight / scale).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", scale.detach())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in)."""
        return F.linear(x, self.weight * self.scale, self.bias)


def by_torch(model):
    """Linear layers and LSTMs replaced by torch's dynamic quantizer."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM}, torch.qint8)


def by_weights(model):
    """Every plain linear layer replaced by one with an int8 parameter."""
    model = deepcopy(model)
    for part in [*model.modules()]:
        for name, child in [*part.named_children()]:
            if type(child) is nn.Linear:
                setattr(part, name, Int8WeightOnly(child))
    return model


class OwnProduct(Tensor):
    """A weight that computes its products itself, as those of torchao do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """F.linear gives a plain tensor; all else keeps the class."""
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.as_subclass(Tensor), *bias, **kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def by_subclass(model):
    """Every plain linear layer with a weight of a subclass of Tensor."""
    model = deepcopy(model)
    for part in model.modules():
        if type(part) is nn.Linear:
            own = part.weight.detach().clone().as_subclass(OwnProduct)
            part.weight = nn.Parameter(own, requires_grad=False)
    return model


QUANTIZERS = pytest.mark.parametrize("quantizer", [by_torch, by_weights, by_subclass])


def made(kind):
    torch.manual_seed(0)
    return MODELS[kind]().eval().requires_grad_(False)


@QUANTIZERS
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("form", ["eager", "packed", "optimized"])
def test_a_model_with_replaced_layers_is_recognised_with(kind, form, quantizer):
    plain = made(kind)
    replaced = quantizer(plain)
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
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    assert dtype_of(layer) == torch.bfloat16


def test_numbers_of_8_bits_are_no_dtype_to_compute_in():
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2)).to(torch.bfloat16)
    eight_bits = layers[0].weight.detach().to(torch.float8_e4m3fn)
    layers[0].weight = nn.Parameter(eight_bits, requires_grad=False)
    assert dtype_of(layers) == one_dtype(layers) == torch.bfloat16


@pytest.mark.parametrize("cast", ["encoder", "output"])
def test_a_model_of_two_dtypes_is_refused_unless_a_precision_is_named(cast):
    model = made("ctc conformer")
    getattr(model, cast).to(torch.bfloat16)
    before = [weight.dtype for weight in model.parameters()]
    with pytest.raises(
        ValueError, match="^model: expected floating-point weights of one dtype, got"
    ):
        Recognizer(model)
    recognizer = Recognizer(model, PipelineConfig(precision="float32", encoder="eager"))
    assert one_dtype(recognizer.model) == torch.float32
    assert [weight.dtype for weight in model.parameters()] == before
