"""The steps of an inference engine: one encoder, changed further and further."""

import copy

import pytest
import torch
from torch import nn

from asrkit.models import FastConformer, FastConformerConfig
from asrkit.models.folded import FoldedNorm
from asrkit.models.packed import PackedLinear, multiplies
from asrkit.workbench.bench import fusion_studies as studies

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    config = FastConformerConfig(width=16, layers=2, heads=2, subsampling_channels=8)
    return FastConformer(config).eval()


def test_every_step_computes_the_same_and_the_encoder_stays_as_it_is(encoder):
    before = {name: weight.clone() for name, weight in encoder.state_dict().items()}
    steps = studies.engine_steps(encoder, torch.randn(2, 70, 80), repeats=3)
    assert steps[0].name == studies.EAGER and steps[0].error == 0
    names = [name for name in studies.STEPS if name != "bfloat16" or multiplies(torch.bfloat16)]
    assert [step.name for step in steps] == names
    for step in steps:
        assert step.ms > 0
        assert step.error < (0.05 if step.name == "bfloat16" else 1e-5), step
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


def test_bad_input_is_refused_in_a_line(encoder):
    with pytest.raises(ValueError, match="^features: expected shape"):
        studies.engine_steps(encoder, torch.randn(1, 70, 79), repeats=1)
    with pytest.raises(ValueError, match="^encoder: expected eval mode, got training mode"):
        studies.engine_steps(encoder.train(), torch.randn(1, 70, 80), repeats=1)
