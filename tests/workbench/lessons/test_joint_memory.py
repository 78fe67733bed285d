import pytest
import torch

from asrkit.workbench.lessons import joint_memory as lesson

SHAPE = {"B": 2, "T": 12, "U1": 5, "V": 16, "D": 8}
TARGETS = lesson.targets_of(torch.tensor([12, 7]), torch.tensor([4, 2]), 16)


def gradients_of(name):
    inputs = lesson.joint_inputs(**SHAPE)
    lesson.VARIANTS[name](inputs, TARGETS).backward()
    return inputs


@pytest.mark.parametrize("name", list(lesson.VARIANTS))
def test_every_variant_has_the_gradients_of_torchaudios_loss(name):
    expected = [leaf.grad for leaf in gradients_of("torchaudio")]
    assert lesson.gradient_error(gradients_of(name), expected) < 1e-3


def test_another_gradient_is_an_error():
    inputs = gradients_of("lean")
    expected = [leaf.grad for leaf in inputs]
    expected[0] = 1.5 * expected[0]
    assert lesson.gradient_error(inputs, expected) == pytest.approx(1 / 3, rel=1e-3)


def test_a_peak_is_within_five_per_cent_of_its_count_or_refused():
    size = (1, 60, 21, 64)
    targets = lesson.full_targets(1, 60, 20, 64)
    measured = lesson.peak_B(lesson.loss_of_zeros, size, torch.float32, *targets)
    assert measured > 2 * 4 * 60 * 21 * 64  # logits and their gradient
    lesson.check_prediction("a peak", 104.0, 100.0)
    with pytest.raises(ValueError, match="a peak: expected within 5 %"):
        lesson.check_prediction("a peak", 106.0, 100.0)
