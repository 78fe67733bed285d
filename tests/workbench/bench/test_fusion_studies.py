"""The steps of an inference engine: one encoder, changed further and further."""

import copy

import pytest
import torch
from torch import nn

from asrkit.cpu import has_int8
from asrkit.models import FastConformer, FastConformerConfig
from asrkit.models.folded import FoldedNorm
from asrkit.models.int8 import Int8Linear
from asrkit.models.packed import PackedLinear, multiplies
from asrkit.workbench.bench import fusion_studies as studies

pytestmark = pytest.mark.usefixtures("one_thread")
LARGEST = {"bfloat16": 0.05, "int8": 0.1}  # errors; those of all other steps: 1e-5


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    config = FastConformerConfig(width=16, layers=2, heads=2, subsampling_channels=8)
    return FastConformer(config).eval()


def test_every_step_computes_the_same_and_the_encoder_stays_as_it_is(encoder):
    before = {name: weight.clone() for name, weight in encoder.state_dict().items()}
    steps = studies.engine_steps(encoder, torch.randn(2, 70, 80), repeats=3)
    assert steps[0].name == studies.EAGER and steps[0].error == 0
    missing = set()
    if not multiplies(torch.bfloat16):
        missing.add("bfloat16")
    if not has_int8():
        missing.add("int8")
    assert [step.name for step in steps] == [name for name in studies.STEPS if name not in missing]
    assert LARGEST.keys() == set(studies.OF_FEWER_BITS)
    for step in steps:
        assert step.ms > 0
        assert step.error < LARGEST.get(step.name, 1e-5), step
    after = encoder.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_each_step_has_what_its_name_says(encoder):
    def built(name):
        return studies.STEPS[name](copy.deepcopy(encoder))

    def parts(name, kind):
        return [part for part in built(name).modules() if type(part) is kind]

    assert not parts(studies.EAGER, FoldedNorm)
    assert len(parts("batch norms folded", FoldedNorm)) == 2
    assert not parts("batch norms folded", PackedLinear)
    assert not parts("weights laid out once", nn.Linear)
    assert len(parts("weights laid out once", nn.SiLU)) == 4
    assert not parts("SiLU in the products", nn.SiLU)
    fused = [one.activation for one in parts("SiLU in the products", PackedLinear)]
    assert fused.count("swish") == 4
    assert all(block.attention.position_cache for block in built("positions kept").blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_is_beside_bfloat16_only_where_the_cpu_has_it(encoder, dtype, monkeypatch):
    if not has_int8():
        pytest.skip("needs a CPU with VNNI or AMX")
    if not multiplies(dtype):
        pytest.skip("needs a CPU with products of bfloat16 in oneDNN")
    capabilities = {"avx512_vnni": True, "avx512_bf16": dtype == torch.bfloat16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    built = studies.STEPS["int8"](encoder)
    layers = [part for part in built.modules() if type(part) is Int8Linear]
    assert len(layers) == 16 and {layer.dtype for layer in layers} == {dtype}


def test_a_step_that_the_cpu_has_no_instructions_for_is_left_out(encoder, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(studies, "multiplies", lambda _: False)
    names = [step.name for step in studies.engine_steps(encoder, torch.randn(1, 9, 80), repeats=1)]
    assert names == [name for name in studies.STEPS if name not in studies.OF_FEWER_BITS]


def test_bad_input_is_refused_in_a_line(encoder):
    with pytest.raises(ValueError, match="^features: expected shape"):
        studies.engine_steps(encoder, torch.randn(1, 70, 79), repeats=1)
    with pytest.raises(ValueError, match="^encoder: expected eval mode, got training mode"):
        studies.engine_steps(encoder.train(), torch.randn(1, 70, 80), repeats=1)
