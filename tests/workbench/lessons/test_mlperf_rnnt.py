"""The small trainings of notebook 10."""

from itertools import islice

import pytest
import torch

from asrkit.models import Checkpoint
from asrkit.optim import Lamb
from asrkit.text import CharTokenizer
from asrkit.workbench.lessons.mlperf_rnnt import studies as scaling_studies


@pytest.fixture(scope="module")
def batches(tiny_speech):
    return list(
        islice(scaling_studies.prepared_batches(tiny_speech, batch_seconds=3.0), 6)
    )


def test_a_trust_ratio_is_that_of_the_step(batches):
    """LAMB moves a matrix by the rate times its own length, so the ratio follows from the move."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = Lamb([weight], 0.1, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(3):
        weight.grad = torch.randn(4, 3, dtype=torch.float64)
        before = weight.detach().clone()
        optimizer.step()
        ratio = scaling_studies.trust_ratio(optimizer, weight, before)
        moved = (before - weight.detach()).norm() / 0.1
        update = moved / ratio  # the length of u
        assert ratio * update == pytest.approx(before.norm().item(), rel=1e-5)
        assert moved.item() == pytest.approx(before.norm().item(), rel=1e-5)


def test_training_with_lamb_notes_each_matrix_in_each_step(tiny_speech):
    ratios = scaling_studies.train_with_lamb(tiny_speech, steps=3)
    assert {"encoder.before.weight_ih_l0", "output.weight"} <= set(ratios)
    assert all(len(values) == 3 and min(values) > 0 for values in ratios.values())


def test_the_mean_of_means_is_right_for_equal_batches_only(batches):
    assert scaling_studies.mean_of_means_error(
        [batches[0], batches[0]]
    ) == pytest.approx(0)
    labels = [int(batch.target_lengths.sum()) for batch in batches]
    unequal = [batches[labels.index(min(labels))], batches[labels.index(max(labels))]]
    assert scaling_studies.mean_of_means_error(unequal) > 1e-3
    with pytest.raises(ValueError, match="parts: expected batches of two processes"):
        scaling_studies.mean_of_means_error(batches[:1])


def test_evaluation_beside_scores_as_in_turn(tiny_speech, batches):
    checkpoint = Checkpoint(
        scaling_studies.small_model().eval(),
        CharTokenizer(),
        {},
        {},
    )
    training = scaling_studies.EvaluatedTraining(
        checkpoint, batches[:4], tiny_speech, every=2
    )
    in_turn = training.in_turn()
    beside = training.beside()
    assert in_turn.scores == beside.scores
    assert set(in_turn.scores) == {2, 4}
    assert [name for name, _ in in_turn.rows["in turn"]].count("evaluation") == 2
    assert [name for name, _ in beside.rows["evaluation"]].count("evaluation") == 2
    assert [name for name, _ in beside.rows["training"]] == 2 * [
        "step",
        "step",
        "wait",
        "copy",
    ]


def test_a_failed_training_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)torchrun ended with 1.*--steps"):
        scaling_studies.train_in_processes(
            tmp_path / "run", processes=2, accumulate=1, steps=0
        )
