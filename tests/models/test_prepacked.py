"""Prepacked layers compute the same numbers for any number of frames, and refuse to be saved."""

import copy

import pytest
import torch
from torch import nn

from asrkit.models import (
    ConvConfig,
    ConvEncoder,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    TransducerModel,
    presets,
)
from asrkit.models.cpu.prepacked import (
    PrepackedConv1d,
    PrepackedDepthwise,
    PrepackedLinear,
    PrepackedPointwise,
    multiply_by_group,
    onednn_supports,
    prepack,
    prepack_by_group,
)

WITH_BFLOAT16 = pytest.mark.skipif(
    not onednn_supports(torch.bfloat16),
    reason="needs a CPU with products of bfloat16 in oneDNN",
)
DTYPES = pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float32, 2e-6), pytest.param(torch.bfloat16, 1e-2, marks=WITH_BFLOAT16)],
    ids=str,
)


def expect_same(found, wanted, tolerance):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert (wanted - found).norm() <= tolerance * wanted.norm()


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_prepacked_layer_computes_the_same(bias, dtype, tolerance):
    plain = nn.Linear(48, 40, bias=bias).eval().to(dtype)
    packed = PrepackedLinear(plain.weight, plain.bias)
    for shape in ((1,), (3, 1), (2, 300), (2, 3, 4)):
        x = torch.randn(*shape, 48).to(dtype)
        expect_same(packed(x), plain(x), tolerance)


@DTYPES
@pytest.mark.parametrize("R", [1, 2, 125, 300])
@torch.inference_mode()
def test_groups_of_columns_are_multiplied_each_with_its_own_weight(R, dtype, tolerance):
    for G, inputs, outputs in (1, 8, 1), (2, 5, 3), (4, 64, 48), (3, 16, 250):
        weight = torch.randn(G, outputs, inputs, dtype=torch.float64)
        rows = torch.randn(R, G, inputs, dtype=torch.float64)
        wanted = torch.einsum("rgi,goi->rgo", rows, weight)
        terms = torch.einsum("rgi,goi->rgo", rows.abs(), weight.abs())
        packed = prepack_by_group(weight.to(dtype), R)
        found = multiply_by_group(rows.flatten(1).to(dtype), packed, G)
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        # terms may cancel
        assert (wanted - found).norm() <= tolerance * terms.norm()


@pytest.mark.parametrize("R", [1, 125, 127, 250])
def test_no_product_by_group_reorders_its_weight(R, capfd):
    packed = prepack_by_group(torch.randn(8, 256, 64), R)
    rows = torch.randn(R, 8 * 64)
    with torch.inference_mode(), torch.backends.mkldnn.verbose(1):
        multiply_by_group(rows, packed, 8)
    output = capfd.readouterr().out
    assert ",convolution," in output
    assert ",reorder," not in output


@DTYPES
@pytest.mark.parametrize("channels", [1, 5, 64])
@torch.inference_mode()
def test_one_channel_becomes_several_in_a_strided_convolution(
    channels, dtype, tolerance
):
    plain = nn.Conv2d(1, channels, 3, stride=2, padding=1).eval().to(dtype)
    packed = PrepackedDepthwise(plain.weight, plain.bias, "relu", stride=2, groups=1)
    for shape in (1, 1, 1), (2, 7, 80), (1, 300, 5):
        images = torch.randn(*shape, 1).to(dtype)  # channels last
        wanted = plain(images.permute(0, 3, 1, 2)).relu().permute(0, 2, 3, 1)
        expect_same(packed(images), wanted, tolerance)


def fake_avx512(monkeypatch, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": has})


@pytest.fixture
def with_avx512(monkeypatch):
    """Prepack convolutions, which compute the same on any CPU."""
    fake_avx512(monkeypatch, True)


CONVOLUTIONS = {
    "large": {"kernel_size": 1093, "padding": 546},
    "large, strided": {"kernel_size": 1093, "padding": 546, "stride": 2},
    "long": {"kernel_size": 25, "padding": 12},
    "strided": {"kernel_size": 11, "padding": 5, "stride": 2},
    "dilated": {"kernel_size": 7, "padding": 6, "dilation": 2},
    "without padding": {"kernel_size": 3},
    "one frame": {"kernel_size": 1},
    "one frame, strided": {"kernel_size": 1, "stride": 2},
    "without bias": {"kernel_size": 1, "bias": False},
    "long without bias": {"kernel_size": 5, "padding": 2, "bias": False},
}


@DTYPES
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("relu", [False, True])
@torch.inference_mode()
def test_a_prepacked_convolution_computes_the_same(
    name, dtype, tolerance, relu, with_avx512
):
    layers = [nn.Conv1d(24, 40, **CONVOLUTIONS[name]), *([nn.ReLU()] if relu else [])]
    plain = nn.Sequential(*layers).eval().to(dtype)
    packed = prepack(copy.deepcopy(plain))
    assert isinstance(packed[0], PrepackedConv1d | PrepackedPointwise)
    for B, T in (1, 3), (2, 57), (1, 450):
        by_channels = torch.randn(B, 24, T).to(dtype)
        by_frames = by_channels.transpose(1, 2).contiguous().transpose(1, 2)
        wanted = plain(by_channels)
        for x in (by_channels, by_frames):
            found = packed(x)
            expect_same(found, wanted, tolerance)
            assert found.stride(1) == 1
            assert bool((found < 0).any()) != relu


@pytest.mark.parametrize("avx512", [True, False])
def test_convolutions_of_a_frame_are_linear_layers_and_depthwise_ones_stay(
    avx512, monkeypatch
):
    fake_avx512(monkeypatch, avx512)
    stay = [
        nn.Conv1d(8, 8, 3, groups=8),
        nn.Conv1d(1, 8, 3),
        nn.Conv1d(8, 1, 29, padding=14),
        nn.Conv1d(8, 8, 3, padding="same"),
        nn.Conv1d(8, 8, 3, padding_mode="reflect"),
        nn.Conv2d(8, 8, 3),
    ]
    changed = [nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3)]
    kinds = [*map(type, prepack(nn.ModuleList(changed + stay).eval()))]
    longer = PrepackedConv1d if avx512 else nn.Conv1d
    assert kinds == [PrepackedPointwise, longer, *map(type, stay)]


@DTYPES
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 2), (5, 1), (25, 1)])
@torch.inference_mode()
def test_no_convolution_reorders_its_weight_slowly(
    kernel, stride, dtype, tolerance, capfd
):
    """With AVX2 oneDNN did so for 96 channels, 5 taps and 20 frames."""
    plain = nn.Conv1d(96, 96, kernel, stride, padding=kernel // 2)
    packed = prepack(nn.Sequential(plain).eval().to(dtype))
    with torch.backends.mkldnn.verbose(1):
        for T in (1, 20, 55, 58, 67, 72, 76, 77, 79, 80, 81, 82, 95, 96, 97, 160, 300):
            packed(torch.randn(1, 96, T).to(dtype))
    found = capfd.readouterr().out
    assert ",primitive,exec," in found
    assert ",reorder,simple" not in found


ENCODERS = {
    "jasper": lambda: CTCModel(presets.mini_jasper()).encoder,
    "convolutions": lambda: ConvEncoder(ConvConfig(width=32, layers=3)),
    "fastconformer": lambda: FastConformer(
        FastConformerConfig(width=32, layers=1, heads=2)
    ),
    "a width of one": lambda: FastConformer(
        FastConformerConfig(width=2, layers=1, heads=1)
    ),
}


@DTYPES
@pytest.mark.parametrize("kind", ENCODERS)
@torch.inference_mode()
def test_a_prepacked_encoder_computes_the_same(kind, dtype, tolerance, with_avx512):
    torch.manual_seed(0)
    encoder = ENCODERS[kind]().eval().to(dtype)
    packed = prepack(copy.deepcopy(encoder))
    for lengths in ([90, 33], [90, 90], [1, 1]):
        batch = torch.randn(2, max(lengths), 80), torch.tensor(lengths)
        wanted, frames = encoder(*batch)
        found, steps = packed(*batch)
        assert torch.equal(frames, steps)
        expect_same(found, wanted, 4 * tolerance)


@torch.inference_mode()
def test_a_whole_model_is_prepacked_in_place():
    model = TransducerModel(presets.tiny()).eval()
    batch = torch.randn(2, 100, 80), torch.tensor([100, 60])
    label = torch.tensor([model.blank] * 2)
    wanted = (*model.encode(*batch), model.predict(label)[0])
    layers = sum(type(part) is nn.Linear for part in model.modules())
    assert prepack(model) is model
    kinds = [type(part) for part in model.modules()]
    assert kinds.count(PrepackedLinear) == layers
    assert nn.Linear not in kinds
    found = (*model.encode(*batch), model.predict(label)[0])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "fused"), [
    (nn.ReLU(), True), (nn.GELU(), True), (nn.GELU("tanh"), False), (nn.Tanh(), False),
], ids=str)  # fmt: skip
@torch.inference_mode()
def test_an_activation_after_a_linear_layer_is_fused(activation, fused):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 40), activation, nn.Linear(40, 24), activation)
    layers.eval()
    x = torch.randn(3, 5, 24)
    wanted = layers(x)
    found = prepack(layers)
    torch.testing.assert_close(found(x), wanted, rtol=1e-5, atol=1e-6)
    assert (type(found[1]) is nn.Identity) == fused == (found[2].activation != "none")
