"""Folded batch norms and `optimize` compute the same numbers."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from asrkit.cpu import has_avx512
from asrkit.models import (
    ConvConfig,
    ConvEncoder,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    Jasper,
    JasperConfig,
    Stage,
    optimize,
    presets,
)
from asrkit.models.cpu.prepacked import (
    PrepackedConv1d,
    PrepackedPointwise,
    onednn_supports,
)
from asrkit.models.folding import fold

WITH_BFLOAT16 = pytest.mark.skipif(
    not onednn_supports(torch.bfloat16),
    reason="needs a CPU with products of bfloat16 in oneDNN",
)
FAST = FastConformerConfig(
    width=16, layers=2, heads=2, subsampling=4, subsampling_channels=4
)
STAGES = (
    Stage(channels=16, kernel=5, repeat=1, stride=2, dense=False),
    Stage(channels=12, kernel=3, repeat=2),
    Stage(channels=20, kernel=5, repeat=1),
    Stage(channels=24, kernel=7, repeat=1, dilation=2, dense=False),
    Stage(channels=8, kernel=1, repeat=1),
)
JASPER = JasperConfig(bins=80, stages=STAGES)
PLAIN = (STAGES[0], replace(STAGES[1], dense=False))
ENCODERS = {
    "jasper": lambda: Jasper(JASPER),
    "jasper without branches": lambda: Jasper(JasperConfig(bins=80, stages=PLAIN)),
    "fastconformer": lambda: FastConformer(FAST),
    "without bias": lambda: FastConformer(replace(FAST, layers=1, bias=False)),
    "convolutions": lambda: ConvEncoder(ConvConfig(width=16, layers=3)),
}


def spread(model):
    """The model in eval mode, with all statistics and norms changed so that each matters."""
    torch.manual_seed(0)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.2, 3)
            part.running_var[::3] = 0
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias)
    return model.eval()


def norms(model):
    """Number of batch norms."""
    return sum(isinstance(part, nn.BatchNorm1d) for part in model.modules())


@pytest.mark.parametrize("kind", ENCODERS)
@torch.inference_mode()
def test_a_folded_encoder_computes_the_same_in_float64(kind):
    plain = spread(ENCODERS[kind]()).double()
    model = copy.deepcopy(plain)
    for _ in range(2):  # the second time there is nothing to fold
        assert norms(plain)
        assert fold(model) is model
        assert norms(model) == 0
    features = torch.randn(4, 61, 80).double()
    for lengths in ([61, 61, 61, 61], [61, 30, 1, 60]):
        wanted, frames = plain(features, torch.tensor(lengths))
        found, steps = model(features, torch.tensor(lengths))
        assert torch.equal(frames, steps)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    if kind == "jasper":  # the branches of a stage are one product
        convs = [part for part in model.modules() if isinstance(part, nn.Conv1d)]
        assert len(convs) == 6 + 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=WITH_BFLOAT16)]
)
@torch.inference_mode()
def test_an_optimized_jasper_has_prepacked_layers_and_computes_the_same(dtype):
    model = spread(CTCModel(presets.mini_jasper())).to(dtype)
    features = torch.randn(2, 100, 80)
    lengths = torch.tensor([100, 60])
    exact = copy.deepcopy(model).double()(features.double(), lengths)[0]
    limit = (model(features, lengths)[0] - exact).norm()
    assert optimize(model) is model
    found, frames = model(features, lengths)
    assert (found - exact).norm() <= 2 * limit + 1e-6
    assert frames.tolist() == [50, 30]
    kinds = [type(part) for part in model.modules()]
    packed = 8 if dtype == torch.float32 else 3
    assert kinds.count(PrepackedConv1d) == packed * has_avx512()
    assert kinds.count(PrepackedPointwise) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_folding_errs_at_most_twice_as_much_as_the_norm_that_it_replaces(dtype):
    plain = spread(FastConformer(FAST))
    features = torch.randn(2, 200, 80)
    lengths = torch.tensor([200, 77])
    exact = copy.deepcopy(plain).double()(features.double(), lengths)[0]
    half = plain.to(dtype)
    limit = (half(features, lengths)[0] - exact).norm()
    error = (fold(half)(features, lengths)[0] - exact).norm()
    assert error <= 2 * limit + 1e-9
