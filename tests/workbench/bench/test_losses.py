"""Cases of the losses on a GPU, as far as they can be seen without one: shapes, arms, and what is counted when."""

import pytest
import torch

from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.suites import losses


@pytest.fixture
def made(monkeypatch):
    """Calls of `logits_case` and `joint_case` by the suite on a GPU with room for everything; the cases have nothing in them."""
    calls = list[tuple]()

    def case(kind):
        def make(*told, dtype=torch.float32, trained=False):
            *loss, shape, device = told
            calls.append((kind, tuple(shape), dtype))
            return Case(
                what=kind,
                arms={"arm": tuple},
                params={"shape": shape},
                ratios=[],
            )

        return make

    for kind in ("logits_case", "joint_case", "ragged_case"):
        monkeypatch.setattr(losses, kind, case(kind))
    return calls


def test_on_a_gpu_the_shape_that_is_asked_for_most_comes_first(made):
    cases = [*losses.suite("cuda", False)]
    assert made[:3] == [
        ("joint_case", losses.ODD, torch.float32),
        ("logits_case", (32, 200, 101, 1025), torch.float32),
        ("logits_case", (32, 200, 101, 1025), torch.bfloat16),
    ]
    assert len(cases) == len(made)


def test_an_eager_joint_in_bfloat16_stands_beside_the_lean_loss_on_a_gpu():
    leaves, rest = losses.joint_inputs((2, 12, 5, 16, 12), "cpu")
    ways = losses.joint_arms(leaves, rest, gpu=True)
    more = {"lean_triton", "lean_triton_bfloat16", "joint_triton_bfloat16", "torchaudio_bfloat16"}
    assert {*ways} - {*losses.joint_arms(leaves, rest)} == more
    half, whole = ways["torchaudio_bfloat16"](), ways["torchaudio"]()
    near(half, whole, 0.05)
    assert not torch.equal(half[0], whole[0]), "its joint is in float32"


def test_torchaudio_has_no_arm_where_its_offsets_end():
    """It would raise, and the cases that follow would not be made."""
    both = {"torchaudio", "torchaudio_bfloat16"}
    assert both <= {*losses.excluded_arms((128, 200, 101, 640, 1024), False)}
    assert not both & {*losses.excluded_arms((32, 200, 101, 640, 1025), False)}
