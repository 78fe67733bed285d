import pytest
import torch

from asrkit.losses import reference, rnnt_loss
from asrkit.workbench.lessons import loss_kernels as lesson

LABELS = torch.tensor([2, 0, 0])


def test_a_loss_summed_in_float64_is_the_reference_and_one_in_bfloat16_is_not():
    logits, targets = lesson.random_lattices(1, 60, 5, 7)
    arcs = lesson.arc_log_probs(logits[0].detach().double(), targets[0][0])
    exact = rnnt_loss(logits.detach().double(), *targets, impl="reference").item()
    assert lesson.loss_summed_in(torch.float64, *arcs).item() == pytest.approx(
        exact, rel=1e-12
    )
    assert abs(lesson.loss_summed_in(torch.bfloat16, *arcs).item() / exact - 1) > 1e-3


@pytest.mark.parametrize(("T", "U1"), [(1, 1), (1, 4), (5, 1), (3, 9)])
def test_the_sum_by_diagonals_is_right_on_lattices_of_any_shape(T, U1):
    logits, targets = lesson.random_lattices(1, T, U1, 4)
    arcs = lesson.arc_log_probs(logits[0].detach().double(), targets[0][0])
    exact = rnnt_loss(logits.detach().double(), *targets, impl="reference").item()
    assert lesson.loss_summed_in(torch.float64, *arcs).item() == pytest.approx(
        exact, rel=1e-12
    )


def test_rounding_errors_are_two_rows_for_each_length_and_format():
    rows = [*lesson.rounding_errors([10, 60], {"bfloat16": torch.bfloat16})]
    assert [(row["T"], row["sums"]) for row in rows] == [
        (10, "float64"), (10, "in the format"), (60, "float64"), (60, "in the format"),
    ]  # fmt: skip
    by_sums = {row["sums"]: row for row in rows[-2:]}
    assert by_sums["float64"]["gradient"] < 0.01 < by_sums["in the format"]["gradient"]
    assert by_sums["float64"]["rounding alone"] > 0


def test_fastemit_makes_labels_earlier_and_posteriors_of_a_label_add_up_to_one():
    without, with_it = (
        lesson.label_posteriors_after_descent(LABELS, 9, x) for x in (0.0, 0.5)
    )
    torch.testing.assert_close(without.sum(0), torch.ones(3), rtol=1e-5, atol=1e-5)
    frames = torch.arange(9.0)
    assert (frames @ with_it / with_it.sum(0) < frames @ without / without.sum(0)).all()


def test_expected_tokens_are_the_frames_where_each_advances_one_and_the_fewest_under_a_large_penalty():
    assert lesson.expected_tokens(0.05, 12, 4, (1,)) == pytest.approx(12, abs=1e-6)
    assert lesson.expected_tokens(40.0, 12, 2, (0, 1, 2, 3, 4)) == pytest.approx(
        3, abs=1e-3
    )


def test_a_band_of_all_rows_loses_nothing_and_a_narrow_one_loses_paths():
    logits = lesson.random_lattices(1, 12, 4, 5)[0][0].detach().double()
    few, all_rows = lesson.nats_lost_in_band(logits, LABELS, [2, 4])
    assert all_rows == pytest.approx(0, abs=1e-9)
    assert few > 0.01


def test_the_band_follows_the_posterior_and_stays_connected():
    path = [0, 0, 0, 2, 2, 3, 4, 4, 4]
    posterior = torch.zeros(9, 5)
    posterior[torch.arange(9), torch.tensor(path)] = 1.0
    starts = lesson.band(posterior, 2)
    rises = starts.diff()
    assert (starts[0], starts[-1]) == (0, 3)
    assert rises.min() >= 0
    assert rises.max() <= 1
    assert all(
        first <= row <= first + 1 for first, row in zip(starts, path, strict=True)
    )


def test_phases_of_a_version_lead_from_logits_to_the_losss_own_gradient():
    logits, targets = lesson.random_lattices(2, 6, 3, 5)
    arms = lesson.phase_arms(logits, targets)
    blank_gradient, _ = arms["loops", "lattice"]()[0]
    by_version = {}
    for version in ("wavefront", "numba_cpu"):
        posteriors = arms[version, "lattice"]()
        by_version[version] = posteriors.blank_posterior[: 6 * 3].view(6, 3)
    expected = -torch.tensor(blank_gradient)
    for posterior in by_version.values():
        torch.testing.assert_close(posterior, expected, rtol=1e-4, atol=1e-6)


def test_the_reference_recursions_agree_with_arc_log_probs():
    logits, targets = lesson.random_lattices(1, 4, 3, 5)
    blank_logp, label_logp = lesson.arc_log_probs(logits[0].detach(), targets[0][0])
    beta = reference.backward_variables(blank_logp.tolist(), label_logp.tolist())
    assert -beta[0][0] == pytest.approx(
        rnnt_loss(logits, *targets, impl="reference").item()
    )
