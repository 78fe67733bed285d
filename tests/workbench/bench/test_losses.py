"""Arms of the losses on a GPU, as far as they can be seen without one."""

import torch

from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.suites import losses


def test_an_eager_joint_in_bfloat16_stands_beside_the_lean_loss_on_a_gpu():
    leaves, rest = losses.joint_inputs((2, 12, 5, 16, 12), "cpu")
    ways = losses.joint_arms(leaves, rest, gpu=True)
    more = {
        "lean_triton",
        "lean_triton_bfloat16",
        "joint_triton_bfloat16",
        "torchaudio_bfloat16",
    }
    assert {*ways} - {*losses.joint_arms(leaves, rest)} == more
    half, whole = ways["torchaudio_bfloat16"](), ways["torchaudio"]()
    near(half, whole, 0.05)
    assert not torch.equal(half[0], whole[0]), "its joint is in float32"


def test_torchaudio_has_no_arm_where_its_offsets_end():
    """It would raise, and the cases that follow would not be made."""
    both = {"torchaudio", "torchaudio_bfloat16"}
    assert both <= {*losses.excluded_arms((128, 200, 101, 640, 1024), False)}
    assert not both & {*losses.excluded_arms((32, 200, 101, 640, 1025), False)}
