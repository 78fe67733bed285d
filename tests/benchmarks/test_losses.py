"""Arms of the losses on a GPU, as far as they can be seen without one."""

import torch

from asrkit.workbench.measure.comparison import apart
from benchmarks.suites import losses


def test_an_eager_joint_in_bfloat16_stands_beside_the_lean_loss_on_a_gpu():
    leaves, targets = losses.joint_inputs((2, 12, 5, 16, 12), "cpu")
    arms = losses.joint_arms(leaves, targets, gpu=True)
    rounded = arms["torchaudio_bfloat16"]()
    whole = arms["torchaudio"]()
    for result, exact in zip(rounded, whole, strict=True):
        difference, size = apart(exact, result)
        assert difference <= 0.05 * size
    assert not torch.equal(rounded[0], whole[0]), "its joint is in float32"


def test_torchaudio_has_no_arm_where_its_offsets_end(monkeypatch):
    """It would raise, and its case would have no records."""
    shape = (2, 40, 11, 28)
    assert "torchaudio" in losses.logits_case(losses.rnnt_loss, shape, "cpu").arms
    monkeypatch.setattr(losses, "MAX_LOGITS", 2 * 40 * 11 * 28)
    assert "torchaudio" not in losses.logits_case(losses.rnnt_loss, shape, "cpu").arms
