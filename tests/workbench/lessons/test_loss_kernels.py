import pytest
import torch

from asrkit.losses import rnnt_loss
from asrkit.workbench.lessons import loss_kernels as lesson

LABELS = torch.tensor([2, 0, 0])


@pytest.mark.parametrize(("T", "U1"), [(1, 1), (1, 4), (5, 1), (3, 9), (60, 5)])
def test_a_loss_summed_in_float64_is_the_reference_and_one_in_bfloat16_is_not(T, U1):
    logits, targets = lesson.random_lattices(1, T, U1, 7)
    logits = logits.detach().double()
    arcs = lesson.arc_log_probs(logits[0], targets[0][0])
    exact = rnnt_loss(logits, *targets, impl="reference").item()
    loss = lesson.loss_summed_in(torch.float64, *arcs).item()
    rounded = lesson.loss_summed_in(torch.bfloat16, *arcs).item()
    assert loss == pytest.approx(exact, rel=1e-12)
    assert rounded != pytest.approx(exact, rel=1e-4)


def test_rounding_errors_are_two_rows_for_each_length_and_format():
    rows = [*lesson.rounding_errors([10, 60], {"bfloat16": torch.bfloat16})]
    assert [row["T"] for row in rows] == [10, 10, 60, 60]
    assert [row["sums"] for row in rows] == ["float64", "in the format"] * 2
    *_, wide, narrow = rows
    assert wide["gradient"] < 0.01 < narrow["gradient"]


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
    path = torch.tensor([0, 0, 0, 2, 2, 3, 4, 4, 4])
    starts = lesson.band(torch.nn.functional.one_hot(path, 5).float(), 2)
    rises = starts.diff()
    assert (starts[0], starts[-1]) == (0, 3)
    assert rises.min() >= 0
    assert rises.max() <= 1
    assert ((starts <= path) & (path <= starts + 1)).all()


@pytest.mark.parametrize("version", ["wavefront", "numba_cpu"])
def test_phases_of_a_version_lead_to_the_posteriors_of_plain_loops(version):
    arms = lesson.phase_arms(*lesson.random_lattices(2, 6, 3, 5))
    found = arms[version, "lattice"]().blank_posterior[: 6 * 3].view(6, 3)
    blank_gradient, _ = arms["loops", "lattice"]()[0]
    torch.testing.assert_close(
        found, -torch.tensor(blank_gradient), rtol=1e-4, atol=1e-6
    )
