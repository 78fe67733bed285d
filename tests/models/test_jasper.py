"""Jasper against its definition, the numbers of the published code, and the published sizes."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asrkit.models import (
    CTCConfig,
    CTCModel,
    Jasper,
    JasperConfig,
    Stage,
    presets,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "jasper.json"
FIRST = Stage(channels=16, kernel=5, repeat=1, stride=2, dense=False)
DENSE = (Stage(channels=12, kernel=3, repeat=2), Stage(channels=20, kernel=5, repeat=3))
WIDE = Stage(channels=24, kernel=7, repeat=1, dilation=2, dense=False)
LAST = Stage(channels=16, kernel=1, repeat=1, dense=False)
SMALL = JasperConfig(bins=8, stages=(FIRST, *DENSE, WIDE, LAST))


def spread(model, seed=0):
    """The model in eval mode and float64, with all statistics of its norms changed."""
    torch.manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.2, 3)
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias)
    return model.eval().double()


def literal(encoder, features, lengths):
    """The definition, step by step: the padding is cleared before every convolution, also before branches."""

    def cleared(x, lengths):
        x = x.clone()
        for row, length in zip(x, lengths, strict=True):
            row[:, length:] = 0
        return x

    def conv_norm(layer, x, lengths):
        conv = layer.conv
        norm = layer.norm
        (kernel,), (stride,), (dilation,) = conv.kernel_size, conv.stride, conv.dilation
        reach = dilation * (kernel - 1)
        x = cleared(x, lengths)
        x = F.conv1d(x, conv.weight, None, stride, reach // 2, dilation)
        columns = norm.running_mean, norm.running_var, norm.weight, norm.bias
        mean, variance, gamma, beta = (values[:, None] for values in columns)
        x = (x - mean) / (variance + 1e-3).sqrt() * gamma + beta
        return x, [-(-length // stride) for length in lengths]

    x, lengths, seen = features.transpose(1, 2), lengths.tolist(), []
    for stage, how in zip(encoder.stages, encoder.config.stages, strict=True):
        before = lengths
        if how.dense:
            seen.append(x)
        for number, layer in enumerate(stage.repeats):
            if number:
                x = x.clamp(min=0)
            x, lengths = conv_norm(layer, x, lengths)
        for branch, source in zip(
            stage.branches, seen if how.dense else [], strict=True
        ):
            x = x + conv_norm(branch, source, before)[0]
        x = x.clamp(min=0)
    return cleared(x, lengths).transpose(1, 2), lengths


@pytest.mark.parametrize(
    "T, lengths", [(23, [23, 14, 1]), (24, [24, 7, 2]), (1, [1, 1, 1]), (9, [9, 9, 9])]
)
@torch.no_grad()
def test_the_encoder_is_its_definition(T, lengths):
    encoder = spread(Jasper(SMALL))
    features, lengths = torch.randn(3, T, 8).double(), torch.tensor(lengths)
    found, frames = encoder(features, lengths)
    wanted, steps = literal(encoder, features, lengths)
    assert frames.tolist() == steps
    assert found.count_nonzero() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def golden_weights(shapes):
    """Weights by the published names that the published code was run with: sines of their index."""
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if name.endswith("num_batches_tracked"):
            made[name] = torch.tensor(number)
            continue
        index = torch.arange(math.prod(shape), dtype=torch.float64)
        waves = torch.sin(index * (number + 1) + number).view(shape)
        if name.endswith("running_var"):
            waves = 1.5 + waves
        elif name.endswith("weight") and len(shape) == 1:
            waves = 1 + 0.5 * waves
        elif len(shape) == 1:
            waves = 0.3 * waves
        else:
            waves = 1.4 * waves / math.sqrt(math.prod(shape[1:]))
        made[name] = waves
    return made


@torch.no_grad()
def test_the_numbers_of_the_published_code_are_ours():
    """Computed once by that code on the CPU, in float64; its weights come in its order, which is ours."""
    golden = json.loads(GOLDEN.read_text())
    theirs = golden_weights(golden["weights"])
    model = CTCModel(CTCConfig(vocab_size=28, encoder=SMALL)).double().eval()
    ours = {name: value.shape for name, value in model.state_dict().items()}
    values = (
        value.reshape(shape)
        for value, shape in zip(theirs.values(), ours.values(), strict=True)
    )
    model.load_state_dict(dict(zip(ours, values, strict=True)))
    features = torch.cos(torch.arange(3 * 23 * 8).double() * 0.7).view(3, 23, 8)
    log_probs, lengths = model(features, torch.tensor([23, 14, 1]))
    assert lengths.tolist() == golden["lengths"]
    for b, t, v, wanted in golden["log_probs"]:
        assert float(log_probs[b, t, v]) == pytest.approx(wanted, abs=1e-9)


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_preset_has_the_published_numbers():
    config = presets.jasper_10x5dr()
    with torch.device("meta"):
        model = CTCModel(config)
    counts = [parameters(stage) for stage in model.encoder.stages]
    assert counts[:2] == [180_736, 3_673_088]
    assert counts[10:] == [77_289_984, 19_957_504, 919_552]
    assert parameters(model) == 332_632_349
    assert sum(len(stage.branches) for stage in model.encoder.stages) == 55
    assert config.encoder.receptive_field == 1763


@pytest.mark.parametrize("stages", [
    SMALL.stages, (LAST,), (FIRST, FIRST, WIDE), (Stage(channels=3, kernel=9, repeat=3), *DENSE),
], ids=["small", "one frame", "two strides", "no stride"])  # fmt: skip
def test_the_receptive_field_is_where_the_gradient_goes(stages):
    config = JasperConfig(bins=8, stages=stages)
    encoder = Jasper(config).double().eval()
    for part in encoder.modules():
        if isinstance(part, nn.Conv1d):  # positive: nothing cancels, no unit is dead
            nn.init.constant_(part.weight, 1 / part.in_channels)
    T = 2 * config.receptive_field + 4
    features = torch.ones(1, T, 8, dtype=torch.float64, requires_grad=True)
    encoded, _ = encoder(features, torch.tensor([T]))
    encoded[0, config.receptive_field // config.subsampling].sum().backward()
    touched = features.grad[0].any(1).nonzero().flatten()
    assert 0 < touched[0] < touched[-1] + 1 < T
    assert touched[-1] - touched[0] + 1 == config.receptive_field
