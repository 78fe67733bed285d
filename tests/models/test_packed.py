"""Packed layers: the same numbers, for any number of frames, and refused where they cannot work."""

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
from asrkit.models.packed import (
    PackedConv1d,
    PackedDepthwise,
    PackedLinear,
    PackedPointwise,
    multiplies,
    multiply_by_group,
    pack,
    pack_by_group,
    packs,
)

WITH_BFLOAT16 = pytest.mark.skipif(
    not multiplies(torch.bfloat16),
    reason="needs a CPU with products of bfloat16 in oneDNN",
)
DTYPES = pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float32, 1e-6), pytest.param(torch.bfloat16, 1e-2, marks=WITH_BFLOAT16)],
    ids=str,
)


@DTYPES
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 300), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same(shape, dtype, tolerance, bias):
    plain = nn.Linear(48, 40, bias=bias).eval().to(dtype)
    x = torch.randn(*shape, 48).to(dtype)
    with torch.inference_mode():
        wanted, found = plain(x), PackedLinear(plain.weight, plain.bias)(x)
    assert found.dtype == dtype and found.shape == wanted.shape
    assert (wanted - found).norm() <= tolerance * wanted.norm()


@DTYPES
@pytest.mark.parametrize("R", [1, 2, 125, 300])
@pytest.mark.parametrize(
    "G, inputs, outputs", [(1, 8, 1), (2, 5, 3), (4, 64, 48), (3, 16, 250)]
)
def test_groups_of_columns_are_multiplied_each_with_its_own_weight(
    R, G, inputs, outputs, dtype, tolerance
):
    weight = torch.randn(G, outputs, inputs, dtype=torch.float64)
    rows = torch.randn(R, G * inputs, dtype=torch.float64)
    parts = rows.unflatten(1, (G, inputs))
    wanted = torch.einsum("rgi,goi->rgo", parts, weight)
    summands = torch.einsum(
        "rgi,goi->rgo", parts.abs(), weight.abs()
    )  # which may cancel
    with torch.inference_mode():
        packed = pack_by_group(weight.to(dtype), R)
        found = multiply_by_group(rows.to(dtype), packed, G)
    assert found.dtype == dtype and found.shape == wanted.shape
    assert (wanted - found).norm() <= tolerance * summands.norm()


@pytest.mark.parametrize("R", [1, 8, 125, 126, 127, 129, 250])
def test_no_product_by_group_lays_its_weight_out_anew(R, capfd):
    packed = pack_by_group(torch.randn(8, 256, 64), R)
    rows = torch.randn(R, 8 * 64)
    with torch.inference_mode(), torch.backends.mkldnn.verbose(1):
        multiply_by_group(rows, packed, 8)
    said = capfd.readouterr().out
    assert ",convolution," in said and ",reorder," not in said


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 80), (1, 300, 5)], ids=str)
@pytest.mark.parametrize("channels", [1, 5, 64])
def test_one_channel_becomes_several_in_a_strided_convolution(
    shape, channels, dtype, tolerance
):
    plain = nn.Conv2d(1, channels, 3, stride=2, padding=1).eval().to(dtype)
    images = torch.randn(*shape, 1).to(dtype)  # channels last
    with torch.inference_mode():
        wanted = plain(images.permute(0, 3, 1, 2)).relu().permute(0, 2, 3, 1)
        packed = PackedDepthwise(plain.weight, plain.bias, "relu", stride=2, groups=1)
        found = packed(images)
    assert found.dtype == dtype and found.shape == wanted.shape
    assert (wanted - found).norm() <= tolerance * wanted.norm()


def say_that_this_cpu_has_avx512(monkeypatch, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": has})


@pytest.fixture
def with_avx512(monkeypatch):
    """Convolutions are packed: they compute the same on any CPU."""
    say_that_this_cpu_has_avx512(monkeypatch, True)


CONVOLUTIONS = {
    "large": {"kernel_size": 4097, "padding": 2048},
    "large, strided": {"kernel_size": 2731, "padding": 1365, "stride": 2},
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
@pytest.mark.parametrize("B, T", [(1, 3), (2, 57), (1, 450)])
@torch.inference_mode()
def test_a_packed_convolution_computes_the_same(
    name, dtype, tolerance, relu, B, T, with_avx512
):
    conv = nn.Conv1d(24, 40, **CONVOLUTIONS[name])
    plain = nn.Sequential(conv, *([nn.ReLU()] if relu else [])).eval().to(dtype)
    model = pack(nn.Sequential(nn.Sequential(*plain) if relu else conv).eval())
    by_channels = torch.randn(B, 24, T).to(dtype)
    by_frames = by_channels.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = plain(by_channels)
    packed = model[0][0] if relu else model[0]
    assert isinstance(packed, PackedConv1d | PackedPointwise)
    for x in (by_channels, by_frames):
        found = model(x)
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        assert (wanted - found).norm() <= tolerance * wanted.norm()
        assert found.stride(1) == 1
    assert bool((found < 0).any()) != relu


@pytest.mark.parametrize("avx512", [True, False])
def test_convolutions_of_a_frame_are_linear_layers_and_depthwise_ones_stay(
    avx512, monkeypatch
):
    say_that_this_cpu_has_avx512(monkeypatch, avx512)
    made = [
        nn.Conv1d(8, 8, 1),
        nn.Conv1d(8, 8, 3),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.Conv1d(8, 8, 3, groups=2),
        nn.Conv1d(1, 8, 3),
        nn.Conv1d(8, 8, 3, padding="same"),
        nn.Conv1d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(8, 8, 3),
    ]
    kinds = [type(layer) for layer in pack(nn.ModuleList(made).eval())]
    stay = [nn.Conv1d] * 5
    longer = PackedConv1d if avx512 else nn.Conv1d
    assert kinds == [PackedPointwise, longer, *stay, nn.Conv2d]


@torch.inference_mode()
def test_no_convolution_lays_its_weight_out_anew_by_the_slowest_way(capfd):
    """With AVX2 oneDNN did so for 96 channels and 20 frames."""
    convolutions = (nn.Conv1d(96, 96, 5, padding=2), nn.Conv1d(96, 96, 1))
    packed = pack(nn.Sequential(*convolutions).eval())
    with torch.backends.mkldnn.verbose(1):
        packed(torch.randn(1, 96, 20))
    found = capfd.readouterr().out
    assert ",primitive,exec," in found and ",reorder,simple" not in found


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
@pytest.mark.parametrize("lengths", [[90, 33], [90, 90], [1, 1]], ids=str)
@torch.inference_mode()
def test_a_packed_encoder_computes_the_same(
    kind, lengths, dtype, tolerance, with_avx512
):
    torch.manual_seed(0)
    encoder = ENCODERS[kind]().eval().to(dtype)
    features, lengths = torch.randn(2, max(lengths), 80), torch.tensor(lengths)
    wanted, frames = encoder(features, lengths)
    found, steps = pack(encoder)(features, lengths)
    assert torch.equal(frames, steps)
    assert (wanted - found).norm() <= 4 * tolerance * wanted.norm()


def test_a_model_is_packed_whole_and_in_place():
    model = TransducerModel(presets.tiny()).eval()
    features, lengths = torch.randn(2, 100, 80), torch.tensor([100, 60])
    with torch.inference_mode():
        wanted = model.encode(features, lengths)
        layers = sum(type(part) is nn.Linear for part in model.modules())
        assert pack(model) is model
        found = model.encode(features, lengths)
        label = model.predict(torch.tensor([model.blank] * 2))[0]
        assert model.join(found[0], label[:, None]).shape == (
            2,
            wanted[0].shape[1],
            model.blank + 1 + len(model.durations),
        )
    assert all(
        torch.allclose(a.float(), b.float(), atol=1e-5)
        for a, b in zip(wanted, found, strict=True)
    )
    parts = [*model.modules()]
    assert sum(type(part) is PackedLinear for part in parts) == layers and not any(
        type(part) is nn.Linear for part in parts
    )


@pytest.mark.parametrize(
    ("activation", "joined"),
    [
        (nn.ReLU(), True),
        (nn.GELU(), True),
        (nn.GELU("tanh"), False),
        (nn.Tanh(), False),
    ],
    ids=["relu", "gelu", "tanh approximation", "tanh"],
)
@torch.inference_mode()
def test_an_activation_behind_a_linear_layer_is_a_part_of_it(activation, joined):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(24, 40), activation, nn.Linear(40, 24), activation
    ).eval()
    x = torch.randn(3, 5, 24)
    wanted = layers(x)
    found = pack(layers)
    torch.testing.assert_close(found(x), wanted, rtol=1e-5, atol=1e-6)
    assert (type(found[1]) is nn.Identity) == joined == (found[2].activation != "none")


@pytest.mark.parametrize("change", [
    lambda model: model.train(), lambda model: model.double(), lambda model: model.to("meta"),
], ids=["training", "float64", "elsewhere"])  # fmt: skip
def test_a_model_that_cannot_be_packed_is_refused_and_left_as_it_is(change):
    model = TransducerModel(presets.tiny()).eval()
    change(model)
    assert not packs(model)
    with pytest.raises(ValueError, match="^model: expected one in eval mode on a CPU"):
        pack(model)
    assert not any(type(part) is PackedLinear for part in model.modules())
