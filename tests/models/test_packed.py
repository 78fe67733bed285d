"""Packed linear layers: the same numbers, for any number of frames, and refused where they cannot work."""

import pytest
import torch
from torch import nn

from asrkit.models import TransducerModel, presets
from asrkit.models.packed import PackedLinear, pack, packs


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 300), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same(shape, dtype, tolerance, bias):
    plain = nn.Linear(48, 40, bias=bias).eval().to(dtype)
    x = torch.randn(*shape, 48).to(dtype)
    with torch.inference_mode():
        wanted, found = plain(x), PackedLinear(plain)(x)
    assert found.dtype == dtype and found.shape == wanted.shape
    assert (wanted - found).norm() <= tolerance * wanted.norm()


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
        torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(wanted, found, strict=True)
    )
    parts = [*model.modules()]
    assert sum(type(part) is PackedLinear for part in parts) == layers and not any(
        type(part) is nn.Linear for part in parts
    )


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


@pytest.mark.parametrize("ask, what", [
    (lambda model: model.state_dict(), "saved"), (lambda model: model.to(torch.bfloat16), "moved or cast"),
], ids=["state_dict", "to"])  # fmt: skip
def test_a_packed_model_is_not_saved_or_cast_with_its_layers_left_out(ask, what):
    model = pack(TransducerModel(presets.tiny()).eval())
    with pytest.raises(
        ValueError,
        match=f"^model: expected layers that are not packed, got packed ones, which cannot be {what}",
    ):
        ask(model)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_cpu_without_products_of_half_precision_packs_float32_only(name, monkeypatch):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: False)
    assert not packs(TransducerModel(presets.tiny()).eval().to(dtype)) and packs(
        TransducerModel(presets.tiny()).eval()
    )
