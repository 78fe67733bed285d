"""Linear layers in int8: oneDNN's layer equals the arithmetic in floats, and an encoder of such layers stays near the exact one."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.cpu import fast_dtype, has_int8, sums_int8_in_32_bits
from asrkit.models import optimize
from asrkit.models.cpu import int8
from asrkit.models.cpu.fused_conformer import FusedFastConformer
from asrkit.models.cpu.int8 import Int8Linear, Int8Output, quantize_weight
from asrkit.models.cpu.int8 import quantize as fast_quantize
from asrkit.models.cpu.prepacked import PrepackedLinear
from asrkit.models.folding import fold

sys.path.append(str(Path(__file__).resolve().parent))
from conformers import build

FAST = {torch.float32, getattr(torch, fast_dtype())}
DTYPES = pytest.mark.parametrize("dtype", sorted(FAST, key=str), ids=str)
ON_THIS_CPU = pytest.mark.skipif(not has_int8(), reason="needs a CPU with AVX2")


@pytest.fixture(params=[127, 64] if sums_int8_in_32_bits() else [64])
def largest(request, monkeypatch):
    """The largest number of a weight: each one whose sums do not overflow on this CPU."""
    monkeypatch.setattr(int8, "sums_int8_in_32_bits", lambda: request.param == 127)
    return request.param


def quantize(x):
    """The reference of `asrkit.models.cpu.int8.quantize`: values, scale and zero."""
    wide = x.float()
    lowest = wide.min().clamp(max=0.0)
    highest = wide.max().clamp(min=0.0)
    scale = ((highest - lowest) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    if not scale.isfinite():
        return torch.zeros_like(wide, dtype=torch.uint8), torch.nan, 1
    steps = 1 / scale
    zero = (-lowest * steps + 0.5).floor().clamp(1, 255)
    values = (wide * steps + (zero + 0.5)).floor().clamp(0, 255)
    return values.to(torch.uint8), scale.item(), int(zero)


def int8_linear(x, weight, bias, activation="none", residual=0.0):
    """What `Int8Linear` computes, in float32 from quantized numbers."""
    values, scale, zero = quantize(x)
    plain = (values.float() - zero) * scale
    weight_values, weight_scale = weight
    plain_weight = weight_values.float() * weight_scale[:, None]
    bias = None if bias is None else bias.float()
    out = nn.functional.linear(plain, plain_weight, bias)
    activate = {"none": torch.clone, "relu": torch.relu, "swish": nn.functional.silu}
    return (activate[activation](out) + residual).to(x.dtype)


X = torch.randn(7, 333, generator=torch.Generator().manual_seed(1))
NUMBERS = {  # activations that are hard to quantize
    "after SiLU": nn.functional.silu(3 * X),
    "positive": X.abs() + 1,
    "negative": -X.abs() - 1,
    "zeros": torch.zeros_like(X),
    "a row of zeros": X * (torch.arange(7) != 3)[:, None],
    "tiny": X * 1e-38,
    "huge": X * 1e36,
    "one number": X[:1, :1],
    "a block and one": torch.linspace(-1, 1, 1025).sin(),
    "transposed": X.T,
}


@pytest.fixture
def both(monkeypatch):
    """Quantizes first by torch, then by Numba."""

    def quantize_twice(x):
        for most in (2**60, 0):
            monkeypatch.setattr(int8, "MOST_BY_TORCH", most)
            yield fast_quantize(x)

    return quantize_twice


@DTYPES
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_quantized_as_by_the_reference_and_at_most_a_step_away(
    name, dtype, both
):
    x = NUMBERS[name].to(dtype)
    wanted, scale, zero = quantize(x)
    (by_torch, *step), (found, *found_step) = both(x)
    assert torch.equal(by_torch, found)
    assert step == found_step
    assert found.shape == x.shape
    assert found.dtype == torch.uint8
    assert found_step == pytest.approx([scale, zero], rel=1e-6)
    apart = (found.int() - wanted.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-3  # a number on a boundary
    back = (wanted.double() - zero) * scale
    assert 1 <= zero <= 255
    assert ((back - x.double()).abs() <= 1.01 * scale).all()
    assert not back[x == 0].any()


@DTYPES
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_not_hidden(bad, dtype, both):
    x = torch.randn(3, 40).to(dtype)
    x[1, 7] = bad
    for values, scale, zero in (quantize(x), *both(x)):
        assert scale != scale
        assert ((values.float() - zero) * scale).isnan().all()


def test_each_output_of_a_weight_has_its_own_scale(largest):
    weight = torch.randn(9, 40) * 10.0 ** torch.arange(-4, 5)[:, None]
    weight[4] = 0
    values, scale = quantize_weight(weight)
    back = values * scale[:, None]
    assert values.dtype == torch.int8
    assert (values.abs().amax(1) == largest).sum() == 8
    assert ((back - weight).abs() <= 0.501 * scale[:, None]).all()
    assert not back[4].any()


@ON_THIS_CPU
@DTYPES
@pytest.mark.parametrize("activation", ["none", "relu", "swish"])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_the_layer_is_the_arithmetic_in_floats(bias, activation, dtype, largest):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias).to(dtype)
    layer = Int8Linear(linear.weight, linear.bias, activation)
    weight = quantize_weight(linear.weight)
    for shape in (1, 24), (1, 1, 24), (3, 5, 24), (130, 24), (2, 200, 24):
        x = torch.randn(shape).to(dtype)
        wanted = int8_linear(x, weight, linear.bias, activation)
        torch.testing.assert_close(layer(x), wanted)
        exact = nn.functional.linear(x.double(), linear.weight.double())
        plain = int8_linear(x, weight, None).double()
        assert 0 < (plain - exact).norm() / exact.norm() < 0.02


@ON_THIS_CPU
@DTYPES
@torch.inference_mode()
def test_a_residual_is_part_of_the_layer(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40).to(dtype)
    layer = Int8Linear(linear.weight, linear.bias)
    x = torch.randn(2, 9, 24).to(dtype)
    residual = torch.randn(2, 9, 40).to(dtype)
    before = residual.clone()
    found = layer.plus(x, residual)
    wanted = int8_linear(
        x, quantize_weight(linear.weight), linear.bias, residual=residual
    )
    torch.testing.assert_close(found, wanted)
    assert torch.equal(residual, before)


def in_floats(encoder):
    """The packed encoder, its layers in int8 computed by the reference."""

    class Reference(nn.Module):
        def __init__(self, weight, bias, activation="none"):
            super().__init__()
            self.bias, self.activation = bias, activation
            self.quantized = quantize_weight(weight)

        def forward(self, x):
            return int8_linear(x, self.quantized, self.bias, self.activation)

        def plus(self, x, residual):
            return int8_linear(x, self.quantized, self.bias, residual=residual)

    return FusedFastConformer(fold(copy.deepcopy(encoder)), Reference)


@ON_THIS_CPU
@DTYPES
@pytest.mark.parametrize("lengths", [[1], [90], [90, 33], [1, 1], [90, 1, 8]], ids=str)
@torch.inference_mode()
def test_an_encoder_in_int8_is_that_of_the_reference_and_stays_near(lengths, dtype):
    encoder = build(width=32).to(dtype)
    features = torch.randn(len(lengths), max(lengths), 80)
    sizes = torch.tensor(lengths)
    for b, length in enumerate(lengths):
        features[b, length:] = torch.nan
    exact, frames = copy.deepcopy(encoder).double()(features.double(), sizes)
    reference = in_floats(encoder)(features, sizes)[0]
    packed = optimize(encoder, linear_layers="int8")
    assert isinstance(packed, FusedFastConformer)
    found, steps = packed(features, sizes)
    assert torch.equal(steps, frames)
    assert found.dtype == dtype
    lost = (reference.double() - exact).norm() / exact.norm()
    apart = (found.double() - reference.double()).norm() / exact.norm()
    assert 0 < lost < 0.1
    assert apart <= 0.5 * lost
    padding = torch.arange(found.shape[1]) >= frames[:, None]
    assert not found[padding].any()


@ON_THIS_CPU
@torch.inference_mode()
def test_all_linear_layers_of_blocks_are_int8_and_nothing_else_is():
    packed = optimize(build(width=32), linear_layers="int8")
    kinds = [type(part) for part in packed.modules()]
    # in each block: feeds, q k v, out, gate, mix
    assert kinds.count(Int8Linear) == 2 * 8
    assert kinds.count(PrepackedLinear) == 1 + 2 + 1  # of the subsampling
    assert nn.Linear not in kinds


@ON_THIS_CPU
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_have_no_int8(dtype):
    wanted = "^int8: expected a FastConformer in float32 or bfloat16 or"
    with pytest.raises(ValueError, match=wanted):
        optimize(build(width=32).to(dtype), linear_layers="int8")


@ON_THIS_CPU
@torch.inference_mode()
def test_an_output_layer_in_int8_is_near_the_float_one(largest):
    torch.manual_seed(0)
    weight, x, bias = torch.randn(300, 64), torch.randn(5, 64), torch.randn(300)
    wanted = torch.nn.functional.linear(x, weight, bias)
    found = Int8Output(weight, bias)(x)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert Int8Output(weight, None)(x.bfloat16()).dtype == torch.float32


@ON_THIS_CPU
@pytest.mark.parametrize("layer", [Int8Linear, Int8Output])
@torch.inference_mode()
def test_no_sum_overflows(layer):
    """All weights and activations are the largest, so pairs of products fill 16 bits."""
    signs = torch.tensor([1.0, -1.0])
    weight = signs[:, None].expand(2, 64).contiguous()
    found = layer(weight, None)(torch.ones(3, 64))
    torch.testing.assert_close(found, 64 * signs.expand(3, 2), rtol=0.01, atol=0)


@ON_THIS_CPU
@torch.inference_mode()
def test_an_encoder_in_int8_gives_the_planted_tokens(largest):
    encoder = build(width=64)
    features, lengths = torch.randn(1, 120, 80), torch.tensor([120])
    exact, _ = encoder(features, lengths)
    tokens = torch.arange(exact.shape[1]) * 7 % 11
    head = torch.linalg.pinv(exact[0]) @ nn.functional.one_hot(tokens).float()
    found, _ = optimize(encoder, linear_layers="int8")(features, lengths)
    assert torch.equal((found[0] @ head).argmax(-1), tokens)


@ON_THIS_CPU
def test_the_arithmetic_holds_with_avx2_alone():
    """Simulated: torch, oneDNN and FBGEMM, limited to AVX2, add pairs of products in 16 bits."""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    limits["FBGEMM_ENABLE_INSTRUCTIONS"] = "AVX2"
    tests = ["-m", "pytest", "-q", __file__, "-k", "layer or sum or encoder"]
    done = subprocess.run(
        [sys.executable, *tests], env=os.environ | limits, stdout=subprocess.PIPE
    )
    assert done.returncode == 0, done.stdout.decode()
