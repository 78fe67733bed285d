"""The loss on a band of the lattice, against the loss on all of it."""

import math

import pytest
import torch

from asrkit.losses import rnnt_loss
from asrkit.losses.rnnt import pruned, reference

T, U, V = 9, 4, 6
BLANK = V - 1


def lattice():
    """Logits (T, U1, V) in float64 with a gradient, and labels (U,)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(T, U + 1, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, BLANK, (U,), generator=generator)
    return logits.requires_grad_(), labels


def exact(logits, labels):
    """The loss on the whole lattice."""
    lengths = torch.tensor([len(logits)]), torch.tensor([len(labels)])
    return rnnt_loss(logits[None], labels[None], *lengths, impl="reference")


def in_band(logits, labels, starts, span):
    """The loss on the band, from logits that are computed nowhere else."""
    frames = torch.arange(len(logits))[:, None]
    kept = logits[frames, pruned.rows_of(starts, span)]
    return pruned.rnnt_loss_in_band(kept, labels, starts, blank=BLANK)


def test_a_band_of_all_rows_is_the_loss_itself_with_its_gradient():
    logits, labels = lattice()
    whole = pruned.band(torch.rand(T, U + 1), U + 1)
    loss = in_band(logits, labels, whole, U + 1)
    expected = exact(logits, labels)
    torch.testing.assert_close(loss, expected.double())
    ours = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, logits)[0])


def test_the_loss_on_a_band_is_that_of_the_lattice_with_all_other_arcs_impossible():
    logits, labels = lattice()
    starts = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])
    outside = torch.ones(T, U + 1, dtype=torch.bool)
    outside.scatter_(1, pruned.rows_of(starts, 2), False)
    log_probs = logits.log_softmax(-1).masked_fill(outside[..., None], -math.inf)
    index = labels.expand(T, U)[..., None]
    label = log_probs[:, :-1].gather(-1, index)[..., 0]
    beta = reference.backward_variables(log_probs[..., BLANK].tolist(), label.tolist())
    loss = in_band(logits, labels, starts, 2)
    assert loss.item() == pytest.approx(-beta[0][0])
    assert loss > exact(logits, labels)


def test_the_gradient_on_a_band_is_that_of_finite_differences():
    logits, labels = lattice()
    starts = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])
    loss = in_band(logits, labels, starts, 2)
    (derivative,) = torch.autograd.grad(loss, logits)
    step = torch.zeros_like(logits)
    step[2, 1, 3] = 1e-4
    with torch.no_grad():
        above = in_band(logits + step, labels, starts, 2)
        below = in_band(logits - step, labels, starts, 2)
    slope = (above - below) / 2e-4
    assert derivative[2, 1, 3].item() == pytest.approx(slope.item(), rel=1e-5)
    assert derivative[0, 4].abs().max() == 0


def test_the_band_follows_the_posterior_and_stays_connected():
    posterior = torch.zeros(T, U + 1)
    path = [0, 0, 0, 2, 2, 3, 4, 4, 4]
    posterior[torch.arange(T), torch.tensor(path)] = 1.0
    starts = pruned.band(posterior, 2)
    rises = starts.diff()
    assert starts[0] == 0 and starts[-1] == U - 1
    assert rises.min() >= 0 and rises.max() <= 1
    assert all(start <= row <= start + 1 for start, row in zip(starts.tolist(), path, strict=True))


def test_a_band_that_cannot_reach_the_last_row_is_refused():
    with pytest.raises(ValueError, match="span: expected rows that reach row 4 in 2 frames, got 2"):
        pruned.band(torch.rand(2, 5), 2)


def test_without_labels_the_band_is_one_row():
    logits = torch.randn(5, 1, V, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.long)
    loss = in_band(logits, none, pruned.band(torch.rand(5, 1), 1), 1)
    assert loss.item() == pytest.approx(-logits.log_softmax(-1)[:, 0, BLANK].sum().item())


def test_the_simple_joint_needs_no_tensor_over_frames_labels_and_tokens():
    generator = torch.Generator().manual_seed(2)
    encoded = torch.randn(T, V, generator=generator, dtype=torch.float64)
    predicted = torch.randn(U + 1, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, BLANK, (U,), generator=generator)
    blank, label = pruned.simple_arc_log_probs(encoded, predicted, labels, blank=BLANK)
    log_probs = (encoded[:, None] + predicted).log_softmax(-1)
    torch.testing.assert_close(blank, log_probs[..., BLANK])
    expected = log_probs[:, :-1].gather(-1, labels.expand(T, U)[..., None])[..., 0]
    torch.testing.assert_close(label, expected)
