"""Feed-forwards in 8-bit floats, emulated on a CPU: the arithmetic, what it loses, and where it is refused."""

import dataclasses

import pytest
import torch

from asrkit.models import FastConformer, FastConformerConfig, optimize
from asrkit.models import fused as ours
from asrkit.models.fused import float8, fuse

SMALL = FastConformerConfig(width=32, layers=2, heads=2, subsampling=4, subsampling_channels=4)


def test_a_row_keeps_four_digits_and_its_largest_number():
    x = torch.randn(50, 64) * 10.0 ** torch.arange(-25, 25)[:, None]  # rows of very different sizes
    x[3] = 0
    values, scale = float8.quantize(x)
    back = values.float() * scale
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (50, 1)
    large = (
        x.abs() > x.abs().amax(-1, keepdim=True) * 2.0**-14
    )  # e4m3's normal numbers span 15 powers of two
    away = ((back - x).abs() / x.abs())[large & (scale > float8.TINY)]
    assert len(away) > 1000 and away.max() <= 2**-4 * (1 + 1e-5)
    assert not back[3].any()
    assert (values.float().abs().amax(-1)[25:] == float8.LARGEST).all()
    places = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(1, places)[25:], x.gather(1, places)[25:])


def test_a_product_is_that_of_the_rounded_numbers():
    x, weight, bias = torch.randn(2, 5, 32), torch.randn(48, 32), torch.randn(48).bfloat16()
    (a, a_scale), (w, w_scale) = float8.silu_quantize(x), float8.quantize(weight)
    wanted = (a.double() * a_scale) @ (w.double() * w_scale).T + bias.double()
    found = float8.scaled_product(a, a_scale, w, w_scale, bias)
    assert (
        found.dtype == torch.bfloat16 and (found.double() - wanted).norm() <= 4e-3 * wanted.norm()
    )
    exact = torch.nn.functional.silu(x).double() @ weight.double().T + bias.double()
    assert 5e-3 < (found.double() - exact).norm() / exact.norm() < 0.06


def test_an_encoder_loses_more_than_in_bfloat16_and_stays_near():
    torch.manual_seed(0)
    plain = FastConformer(SMALL).eval()
    features, lengths = torch.randn(2, 200, 80), torch.tensor([200, 90])
    with torch.inference_mode():
        exact = plain(features, lengths)[0]
        half = plain.to(torch.bfloat16)
        in_half, found = (
            fuse(half, feed_forward=kind)(features, lengths)[0] for kind in ("as_it_is", "float8")
        )
    loss, least = ((one.float() - exact).norm() / exact.norm() for one in (found, in_half))
    assert found.dtype == torch.bfloat16 and least < loss < 0.1


def test_the_feed_forwards_read_and_write_bytes_where_they_read_and_wrote_pairs():
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen = []
    with FakeTensorMode():
        x = torch.zeros(2, 16, 32, dtype=torch.bfloat16, device="cuda")
        values, scale = ours.quantize(x)
        weight, weight_scale = ours.quantize(
            torch.zeros(48, 32, dtype=torch.bfloat16, device="cuda")
        )
        seen = (
            values.dtype,
            values.shape,
            scale.shape,
            ours.scaled_product(values, scale, weight, weight_scale, None).shape,
        )
    assert seen == (torch.float8_e4m3fn, (2, 16, 32), (2, 16, 1), (2, 16, 48))


@pytest.mark.parametrize("change, given, message", [
    ({}, "float32", "^feed_forward: expected a model in bfloat16 with 'float8', got torch.float32"),
    ({"width": 24}, "bfloat16", r"^feed_forward: expected widths that 16 divides with 'float8', got \(24, 96\)"),
])  # fmt: skip
def test_other_dtypes_and_widths_are_refused(change, given, message):
    encoder = FastConformer(dataclasses.replace(SMALL, **change)).eval().to(getattr(torch, given))
    with pytest.raises(ValueError, match=message):
        fuse(encoder, feed_forward="float8")


def test_the_door_refuses_it_on_a_cpu_and_knows_no_other():
    encoder = FastConformer(SMALL).eval()
    with pytest.raises(
        ValueError,
        match="^feed_forward: expected 'as_it_is' but for a FastConformer on CUDA, got 'float8'",
    ):
        optimize(encoder, feed_forward="float8")
    with pytest.raises(
        ValueError, match="^feed_forward: expected one of 'as_it_is', 'float8', got 'int4'"
    ):
        fuse(encoder, feed_forward="int4")
