"""A FastConformer packed for a CPU: the eager one's numbers, for all shapes, masks and contexts."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from asrkit.models import (
    FastConformer,
    FastConformerConfig,
    TransducerModel,
    limit_context,
    optimize,
    presets,
)
from asrkit.models.packed import multiplies
from asrkit.models.packed_conformer import PackedFastConformer

SMALL = FastConformerConfig(
    width=16, layers=2, heads=2, subsampling=4, subsampling_channels=4
)
WITH_BFLOAT16 = pytest.mark.skipif(
    not multiplies(torch.bfloat16),
    reason="needs a CPU with products of bfloat16 in oneDNN",
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=WITH_BFLOAT16)], ids=str
)


def build(**changes) -> FastConformer:
    """An encoder in eval mode in which every weight and statistic counts."""
    torch.manual_seed(0)
    encoder = FastConformer(dataclasses.replace(SMALL, **changes))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for block in encoder.blocks:
            block.batch_norm.running_mean.normal_()
            block.batch_norm.running_var.uniform_(0.5, 2)
    return encoder.eval()


def expect_no_worse(encoder, features, lengths):
    """Outputs of `encoder` packed are as near to float64's as the eager ones, and zero in padding."""
    exact, frames = copy.deepcopy(encoder).double()(features.double(), lengths)
    limit = (encoder(features, lengths)[0] - exact).norm()
    packed = optimize(encoder)
    assert isinstance(packed, PackedFastConformer)
    for _ in range(2):  # the second time with cached positions
        found, steps = packed(features, lengths)
        assert torch.equal(steps, frames)
        assert (found.dtype, found.shape) == (packed.dtype, exact.shape)
        assert (found - exact).norm() <= 1.5 * limit + 1e-6 * exact.norm()
        padding = torch.arange(found.shape[1]) >= frames[:, None]
        assert not found[padding].any()


@DTYPES
@pytest.mark.parametrize("subsampling", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[1], [90, 33], [90, 90], [90, 1, 8]], ids=str)
@torch.inference_mode()
def test_it_computes_what_the_eager_encoder_computes(subsampling, lengths, dtype):
    encoder = build(subsampling=subsampling).to(dtype)
    features = torch.randn(len(lengths), max(lengths), 80)
    expect_no_worse(encoder, features, torch.tensor(lengths))


@DTYPES
@pytest.mark.parametrize(
    "context", [(2, 1), (0, 3), (3, 0), (0, 0), (-1, 0), (2, -1), (20, 20)], ids=str
)
@torch.inference_mode()
def test_limited_context(context, dtype):
    for shorter in (61, 150):
        encoder = build(context=context).to(dtype)
        expect_no_worse(encoder, torch.randn(2, 150, 80), torch.tensor([150, shorter]))


@pytest.mark.parametrize(
    "changes",
    [{"bias": False}, {"scale_input": True}, {"layers": 0}, {"heads": 1}, {"width": 10},
     {"kernel": 1}, {"expansion": 1}, {"subsampling_channels": 3}, {"bins": 1}],
    ids=str,
)  # fmt: skip
@torch.inference_mode()
def test_every_field_of_the_config(changes):
    encoder = build(**changes)
    features = torch.randn(2, 70, encoder.config.bins)
    expect_no_worse(encoder, features, torch.tensor([70, 20]))


@torch.inference_mode()
def test_what_lies_in_the_padding_cannot_matter():
    encoder = optimize(build())
    features, lengths = torch.randn(3, 90, 80), torch.tensor([90, 33, 1])
    wanted = encoder(features, lengths)[0]
    for b, length in enumerate(lengths.tolist()):
        features[b, length:] = torch.nan
    torch.testing.assert_close(encoder(features, lengths)[0], wanted, rtol=0, atol=0)


@torch.inference_mode()
def test_optimize_packs_the_encoder_of_a_model_and_context_may_be_limited_before():
    model = TransducerModel(presets.tiny()).eval()
    limit_context(model, (4, 2))
    features, lengths = torch.randn(2, 200, 80), torch.tensor([200, 60])
    wanted = model.encode(features, lengths)[0]
    assert optimize(model) is model
    assert isinstance(model.encoder, PackedFastConformer)
    found = model.encode(features, lengths)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    kinds = {type(part) for part in model.modules()}
    assert not kinds & {nn.Linear, nn.Conv1d, nn.Conv2d}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@torch.inference_mode()
def test_other_dtypes_are_not_fused(dtype):
    encoder = build().to(dtype)
    features, lengths = torch.randn(2, 90, 80), torch.tensor([90, 33])
    wanted, _ = encoder(features, lengths)
    found = optimize(encoder)
    assert found is encoder
    torch.testing.assert_close(
        found(features, lengths)[0], wanted, rtol=1e-2, atol=1e-2
    )


@torch.inference_mode()
def test_kept_positions_are_those_of_the_shape_at_hand_whatever_came_before():
    plain, encoder = build(), optimize(build())
    for B, T in ((1, 96), (1, 40), (1, 96), (3, 32), (1, 700), (1, 40)):
        features, lengths = torch.randn(B, T, 80), torch.full((B,), T)
        wanted, _ = plain(features, lengths)
        found, _ = encoder(features, lengths)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        fresh, _ = optimize(build())(features, lengths)
        assert torch.equal(found, fresh)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao moves to torchao
@torch.inference_mode()
def test_a_quantiser_of_torch_may_replace_every_linear_layer_of_the_eager_encoder():
    encoder = build()
    features, lengths = torch.randn(2, 90, 80), torch.tensor([90, 33])
    wanted, frames = encoder(features, lengths)
    quantised = torch.ao.quantization.quantize_dynamic(
        encoder, {nn.Linear}, torch.qint8
    )
    assert not any(type(part) is nn.Linear for part in quantised.modules())
    found, steps = quantised(features, lengths)
    assert torch.equal(steps, frames)
    error = (found - wanted).norm() / wanted.norm()
    assert 0 < error < 0.1
