"""Jasper against an independent reading of its definition, the published code's own numbers, and its published sizes."""

import json
import math
from dataclasses import replace
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
from asrkit.models.jasper import ConvNorm, strided
from asrkit.workbench.measure import host_reads

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "jasper.json"
FIRST = Stage(channels=16, kernel=5, repeat=1, stride=2, dense=False)
DENSE = (Stage(channels=12, kernel=3, repeat=2), Stage(channels=20, kernel=5, repeat=3))
WIDE = Stage(channels=24, kernel=7, repeat=1, dilation=2, dense=False)
LAST = Stage(channels=16, kernel=1, repeat=1, dense=False)
SMALL = JasperConfig(bins=8, stages=(FIRST, *DENSE, WIDE, LAST))
# Channels and kernel of the ten blocks of Jasper 10x5 DR, from the published configuration.
BLOCKS = [(256, 11), (384, 13), (512, 17), (640, 21), (768, 25)]


def spread(model, seed=0):
    """The model in eval mode and float64, no statistic of its norms at its first value."""
    torch.manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.2, 3)
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias)
    return model.eval().double()


def literal(encoder, features, lengths):
    """The definition, step by step: the padding is cleared before every convolution, that of branches too."""

    def cleared(x, lengths):
        x = x.clone()
        for row, length in zip(x, lengths, strict=True):
            row[:, length:] = 0
        return x

    def conv_norm(layer, x, lengths):
        conv, norm = layer.conv, layer.norm
        kernel, (stride,), (dilation,) = (
            conv.weight.shape[-1],
            conv.stride,
            conv.dilation,
        )
        padding = dilation * (kernel - 1) // 2
        x = F.conv1d(cleared(x, lengths), conv.weight, None, stride, padding, dilation)
        columns = norm.running_mean, norm.running_var, norm.weight, norm.bias
        mean, variance, gamma, beta = (values[:, None] for values in columns)
        reach = dilation * (kernel - 1)
        after = [(n + 2 * padding - reach - 1) // stride + 1 for n in lengths]
        return (x - mean) / (variance + 1e-3).sqrt() * gamma + beta, after

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
    assert [value.numel() for value in theirs.values()] == [
        shape.numel() for shape in ours.values()
    ]
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


def test_the_preset_has_the_published_number_of_parameters_in_every_stage():
    with torch.device("meta"):
        model = CTCModel(presets.jasper_10x5dr())
    counts = [
        sum(p.numel() for p in stage.parameters()) for stage in model.encoder.stages
    ]
    assert counts[0] == 180_736
    assert counts[1] == 3_673_088
    assert counts[10] == 77_289_984
    assert counts[11:] == [19_957_504, 919_552]
    assert sum(p.numel() for p in model.output.parameters()) == 29_725
    assert sum(p.numel() for p in model.parameters()) == 332_632_349
    assert sum(len(stage.branches) for stage in model.encoder.stages) == 55
    inputs, sources = 256, []
    for count, (channels, kernel) in zip(
        counts[1:11], [b for b in BLOCKS for _ in range(2)], strict=True
    ):
        sources.append(inputs)
        convolutions = kernel * channels * (inputs + 4 * channels) + channels * sum(
            sources
        )
        assert count == convolutions + 2 * channels * (5 + len(sources))
        inputs = channels


@pytest.mark.parametrize("filler", [7.0, float("nan"), float("inf")])
@torch.no_grad()
def test_padding_and_the_rest_of_the_batch_change_nothing(filler):
    encoder = spread(Jasper(SMALL))
    lengths = torch.tensor([50, 33, 1, 8, 49])
    features = torch.randn(5, 50, 8).double()
    for row, length in zip(features, lengths.tolist(), strict=True):
        row[length:] = filler
    together, frames = encoder(features, lengths)
    for b, length in enumerate(lengths.tolist()):
        alone, steps = encoder(features[b : b + 1, :length], lengths[b : b + 1])
        assert frames[b] == steps == -(-length // 2)
        torch.testing.assert_close(
            together[b, : frames[b]], alone[0], rtol=1e-10, atol=1e-10
        )
        assert not together[b, frames[b] :].any()


def test_the_padding_of_every_convolution_is_zero_also_in_training():
    encoder = Jasper(SMALL).train()
    lengths, T = torch.tensor([21, 9]), 21
    features = torch.full((2, T, 8), float("nan"))
    features[0], features[1, :9] = torch.randn(T, 8), torch.randn(9, 8)
    inputs = []
    for part in encoder.modules():
        if isinstance(part, ConvNorm):
            part.register_forward_pre_hook(
                lambda _, args: inputs.append(args[0].detach())
            )
    encoded, _ = encoder(features, lengths)
    assert len(inputs) == 8 + 3, "convolutions of stages and of branches"
    for x in inputs:
        valid = 9 if x.shape[2] == T else 5
        assert not x[1, :, valid:].any()
    encoded.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in encoder.parameters())


def reach(config, frame):
    """Feature frames from the first to the last that an encoded frame's gradient touches."""
    encoder = Jasper(config).double().eval()
    for part in encoder.modules():
        if isinstance(
            part, nn.Conv1d
        ):  # all positive: nothing cancels, no unit is dead
            nn.init.constant_(part.weight, 1 / part.in_channels)
    T = 2 * config.receptive_field + 4
    features = torch.ones(1, T, config.bins, dtype=torch.float64, requires_grad=True)
    encoded, _ = encoder(features, torch.tensor([T]))
    encoded[0, frame].sum().backward()
    touched = features.grad[0].abs().sum(1).nonzero().flatten().tolist()
    assert touched[0] > 0 and touched[-1] < T - 1
    return touched[-1] - touched[0] + 1


@pytest.mark.parametrize(
    "stages",
    [
        SMALL.stages,
        (LAST,),
        (FIRST, FIRST, WIDE),
        (Stage(channels=3, kernel=9, repeat=3), *DENSE),
    ],
    ids=["small", "one frame", "two strides", "no stride"],
)  # fmt: skip
def test_the_receptive_field_is_where_the_gradient_goes(stages):
    config = JasperConfig(bins=8, stages=stages)
    frame = config.receptive_field // config.subsampling
    assert reach(config, frame) == config.receptive_field


def test_the_receptive_field_of_the_preset_is_1763_frames():
    config = presets.jasper_10x5dr().encoder
    assert config.receptive_field == 1763
    narrow = [replace(stage, channels=2) for stage in config.stages]
    assert reach(JasperConfig(bins=2, stages=narrow), 881) == 1763


@pytest.mark.parametrize(
    "kernel, stride, dilation",
    [(1, 1, 1), (11, 2, 1), (29, 1, 2), (3, 3, 1), (5, 1, 3), (1, 2, 1)],
)
def test_lengths_are_those_of_torchs_convolution(kernel, stride, dilation):
    lengths = torch.arange(1, 201)
    layer = ConvNorm(1, 1, kernel, stride=stride, dilation=dilation)
    frames = [
        layer.conv(torch.zeros(1, 1, length)).shape[2] for length in lengths.tolist()
    ]
    assert strided(lengths, stride).tolist() == frames


def test_dense_stages_alone_have_branches():
    assert [len(stage.branches) for stage in Jasper(SMALL).stages] == [0, 1, 2, 0, 0]
    assert SMALL.branch_channels() == [[], [16], [16, 12], [], []]
    with pytest.raises(
        ValueError,
        match="^stages: expected no stride behind a dense stage, got stride 2 in stage 1",
    ):
        JasperConfig(stages=(DENSE[0], FIRST))


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_step_reads_nothing_from_the_device(where):
    with torch.device("meta"):
        model = CTCModel(presets.mini_jasper())
        features = torch.zeros(3, 40, 80)
    lengths = torch.tensor([40, 31, 2]).to(where)
    assert (
        host_reads(lambda: model(features, lengths)[0].sum().backward(), device="meta")
        == {}
    )


BAD = {
    "an even kernel": (lambda: Stage(channels=4, kernel=10), "^kernel: expected an odd number of frames, got 10"),
    "stride and dilation": (
        lambda: Stage(channels=4, kernel=3, repeat=1, stride=2, dilation=2, dense=False), "^stride: expected 1, but for",
    ),
    "a stride that repeats": (
        lambda: Stage(channels=4, kernel=3, stride=2, dense=False), "^stride: expected 1, but for a stage with repeat=1",
    ),
    "a dense stride": (lambda: Stage(channels=4, kernel=3, repeat=1, stride=2), "^stride: expected 1, but for a stage"),
    "no stages": (lambda: JasperConfig(stages=()), "^config: expected a bin and a Stage at least"),
    "other bins": (lambda: encode(torch.zeros(1, 9, 80), [9]), "^features: expected shape .B, T, F=8."),
}  # fmt: skip


def encode(features, lengths):
    return Jasper(SMALL)(features, torch.tensor(lengths, dtype=torch.int64))


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_in_one_line(case):
    call, said = BAD[case]
    with pytest.raises(ValueError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
