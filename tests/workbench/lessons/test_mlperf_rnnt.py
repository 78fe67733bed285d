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


def test_a_trust_ratio_is_that_of_the_step(batches):
    """LAMB moves a matrix by the rate times its own length, so the ratio follows from the move."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = Lamb([weight], 0.1, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(3):
        weight.grad = torch.randn(4, 3, dtype=torch.float64)
        before = weight.detach().clone()
        optimizer.step()
        ratio = lesson.trust_ratio(optimizer, weight, before)
        moved = (before - weight.detach()).norm() / 0.1
        update = moved / ratio  # the length of u
        assert ratio * update == pytest.approx(before.norm().item(), rel=1e-5)
        assert moved.item() == pytest.approx(before.norm().item(), rel=1e-5)


def test_training_with_lamb_notes_each_matrix_in_each_step(tiny_speech):
    ratios = lesson.train_with_lamb(tiny_speech, steps=3)
    assert {"encoder.before.weight_ih_l0", "output.weight"} <= set(ratios)
    assert all(len(values) == 3 and min(values) > 0 for values in ratios.values())


def test_the_mean_of_means_is_right_for_equal_batches_only(batches):
    assert lesson.mean_of_means_error([batches[0], batches[0]]) == pytest.approx(0)
    labels = [int(batch.target_lengths.sum()) for batch in batches]
    unequal = [batches[labels.index(min(labels))], batches[labels.index(max(labels))]]
    assert lesson.mean_of_means_error(unequal) > 1e-3


def test_evaluation_beside_scores_as_in_turn(tiny_speech, batches):
    checkpoint = Checkpoint(
        lesson.small_model().eval(),
        CharTokenizer(),
        {},
        {},
    )
    given = checkpoint, batches[:4], tiny_speech
    in_turn, scores = lesson.train_in_turn(*given, every=2)
    beside, scores_beside = lesson.train_beside(*given, every=2)
    assert scores == scores_beside
    assert set(scores) == {2, 4}
    names = {
        row: [name for name, _ in spans] for row, spans in (in_turn | beside).items()
    }
    assert names == {
        "in turn": 2 * ["step", "step", "evaluation"],
        "training": 2 * ["step", "step", "wait", "copy"],
        "evaluation": 2 * ["idle", "evaluation"],
    }
    assert all(ms >= 0 for spans in beside.values() for _, ms in spans)


def test_a_failed_training_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)torchrun ended with 1.*--steps"):
        lesson.train_in_processes(tmp_path / "run", processes=2, accumulate=1, steps=0)


def draw(T, K):
    random = torch.Generator().manual_seed(T + K)
    x = torch.randn(2, 3, T, dtype=torch.float64, generator=random, requires_grad=True)
    weight = torch.randn(
        4, 3, K, dtype=torch.float64, generator=random, requires_grad=True
    )
    return x, weight


@pytest.mark.parametrize(
    ("T", "K", "parts"),
    [(1, 1, 1), (7, 1, 7), (12, 3, 4), (29, 11, 3), (29, 11, 5), (64, 13, 8)],
)
def test_parts_with_their_halo_give_the_whole_convolution_and_its_gradients(
    T, K, parts
):
    x, weight = draw(T, K)
    whole = F.conv1d(x, weight, padding=K // 2)
    split = lesson.split_convolution(x, weight, parts)
    upstream = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator())
    wanted = torch.autograd.grad(whole, (x, weight), upstream)
    found = torch.autograd.grad(split, (x, weight), upstream)
    for ours, theirs in zip((split, *found), (whole, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_without_the_halo_only_outputs_at_the_edges_between_parts_are_off():
    x, weight = draw(40, 5)
    off = lesson.split_convolution(x, weight, 4, halo=False) - F.conv1d(
        x, weight, padding=2
    )
    frames = off.abs().amax((0, 1)) > 1e-9
    assert frames.nonzero()[:, 0].tolist() == [
        8,
        9,
        10,
        11,
        18,
        19,
        20,
        21,
        28,
        29,
        30,
        31,
    ]
