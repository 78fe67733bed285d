"""The fused FastConformer computes the eager one's numbers for all shapes, masks and contexts."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.models import (
    TransducerModel,
    limit_context,
    optimize,
    presets,
)
from asrkit.models.cpu.fused_conformer import FusedFastConformer
from asrkit.models.cpu.prepacked import onednn_supports

sys.path.append(str(Path(__file__).resolve().parent))
from conformers import build

WITH_BFLOAT16 = pytest.mark.skipif(
    not onednn_supports(torch.bfloat16),
    reason="needs a CPU with products of bfloat16 in oneDNN",
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=WITH_BFLOAT16)], ids=str
)


def expect_no_worse(encoder, features, lengths):
    """The fused `encoder` is as near to float64 as the eager one, ignores the padding, and is zero there."""
    for b, length in enumerate(lengths):
        features[b, length:] = torch.nan
    exact, frames = copy.deepcopy(encoder).double()(features.double(), lengths)
    limit = (encoder(features, lengths)[0] - exact).norm()
    fused = optimize(encoder)
    assert isinstance(fused, FusedFastConformer)
    for _ in range(2):  # the second time with cached positions
        found, steps = fused(features, lengths)
        assert torch.equal(steps, frames)
        assert (found.dtype, found.shape) == (fused.dtype, exact.shape)
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
def test_optimize_fuses_the_encoder_of_a_model_with_limited_context():
    model = TransducerModel(presets.tiny()).eval()
    limit_context(model, (4, 2))
    features = torch.randn(2, 200, 80)
    lengths = torch.tensor([200, 60])
    wanted = model.encode(features, lengths)[0]
    assert optimize(model) is model
    assert isinstance(model.encoder, FusedFastConformer)
    found = model.encode(features, lengths)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    kinds = {type(part) for part in model.modules()}
    assert not kinds & {nn.Linear, nn.Conv1d, nn.Conv2d}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@torch.inference_mode()
def test_other_dtypes_are_not_fused(dtype):
    encoder = build().to(dtype)
    features = torch.randn(2, 90, 80)
    lengths = torch.tensor([90, 33])
    wanted, _ = encoder(features, lengths)
    found = optimize(encoder)
    assert found is encoder
    torch.testing.assert_close(
        found(features, lengths)[0], wanted, rtol=1e-2, atol=1e-2
    )


@torch.inference_mode()
def test_cached_positions_do_not_depend_on_earlier_calls():
    plain = build()
    encoder = optimize(build())
    for B, T in ((1, 96), (1, 40), (1, 96), (3, 32), (1, 700), (1, 40)):
        features = torch.randn(B, T, 80)
        lengths = torch.full((B,), T)
        wanted, _ = plain(features, lengths)
        found, _ = encoder(features, lengths)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        fresh, _ = optimize(build())(features, lengths)
        assert torch.equal(found, fresh)
