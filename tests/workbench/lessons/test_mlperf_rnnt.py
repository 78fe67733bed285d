"""The small trainings of notebook 10, and a convolution whose frames are shared out."""

from itertools import islice

import pytest
import torch
from torch.nn import functional as F

from asrkit.models import Checkpoint
from asrkit.optim import Lamb
from asrkit.text import CharTokenizer
from asrkit.workbench.lessons import mlperf_rnnt as lesson


@pytest.fixture(scope="module")
def batches(tiny_speech):
    return list(islice(lesson.prepared_batches(tiny_speech, batch_seconds=3.0), 6))


def test_a_trust_ratio_is_the_length_of_a_weight_over_that_of_its_update():
    """Under one gradient all the time, the direction of Adam is its sign."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    weight.grad = torch.randn(4, 3, dtype=torch.float64)
    optimizer = Lamb([weight], 0.1, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(3):
        before = weight.detach().clone()
        optimizer.step()
        update = weight.grad.sign() + 0.01 * before
        ratio = lesson.trust_ratio(optimizer, weight, before)
        assert ratio == pytest.approx(float(before.norm() / update.norm()), rel=1e-4)


def test_training_with_lamb_notes_each_matrix_in_each_step(tiny_speech):
    ratios = lesson.train_with_lamb(tiny_speech, steps=3)
    assert {"encoder.before.weight_ih_l0", "output.weight"} <= set(ratios)
    assert all(len(values) == 3 and min(values) > 0 for values in ratios.values())


def test_the_mean_of_means_is_right_for_equal_batches_only(batches):
    assert lesson.mean_of_means_error([batches[0], batches[0]]) == pytest.approx(0)
    labels = [int(batch.target_lengths.sum()) for batch in batches]
    unequal = [batches[labels.index(min(labels))], batches[labels.index(max(labels))]]
    assert lesson.mean_of_means_error(unequal) > 1e-3


@pytest.mark.live
def test_evaluation_beside_scores_as_in_turn(tiny_speech, batches):
    model = lesson.small_model().eval()
    checkpoint = Checkpoint(model, CharTokenizer(), {}, {})
    given = checkpoint, batches[:4], tiny_speech
    in_turn, scores = lesson.train_in_turn(*given, every=2)
    beside, scores_beside = lesson.train_beside(*given, every=2)
    assert scores == scores_beside and {*scores} == {2, 4}
    spans = in_turn | beside
    assert {row: [name for name, _ in parts] for row, parts in spans.items()} == {
        "in turn": 2 * ["step", "step", "evaluation"],
        "training": 2 * ["step", "step", "wait", "copy"],
        "evaluation": 2 * ["idle", "evaluation"],
    }


@pytest.mark.live
def test_a_failed_training_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)torchrun ended with 1.*--steps"):
        lesson.train_in_processes(tmp_path / "run", processes=2, accumulate=1, steps=0)


def draw(T, K):
    """Frames (2, 3, T) and a weight (4, 3, K) in float64, which require gradients."""
    random = torch.Generator().manual_seed(T + K)
    drawn = (
        torch.randn(2, 3, T, generator=random),
        torch.randn(4, 3, K, generator=random),
    )
    return [values.double().requires_grad_() for values in drawn]


@pytest.mark.parametrize(
    ("T", "K", "parts"),
    [(1, 1, 1), (7, 1, 7), (12, 3, 4), (29, 11, 3), (29, 11, 5), (64, 13, 8)],
)
def test_parts_with_their_halo_give_the_whole_convolution_and_its_gradients(
    T, K, parts
):
    inputs = draw(T, K)
    whole = F.conv1d(*inputs, padding=K // 2)
    split = lesson.split_convolution(*inputs, parts)
    wanted = torch.autograd.grad(whole.square().sum(), inputs)
    found = torch.autograd.grad(split.square().sum(), inputs)
    torch.testing.assert_close(
        (split, *found), (whole, *wanted), rtol=1e-12, atol=1e-12
    )


def test_without_the_halo_only_outputs_at_the_edges_between_parts_are_off():
    x, weight = draw(40, 5)
    whole = F.conv1d(x, weight, padding=2)
    off = lesson.split_convolution(x, weight, 4, halo=False) - whole
    frames = (off.abs().amax((0, 1)) > 1e-9).nonzero()[:, 0]
    assert frames.tolist() == [*range(8, 12), *range(18, 22), *range(28, 32)]
