"""The CTC loss by frames against torch's kernel, values and gradients."""

import math

import pytest
import torch
from torch.nn import functional as F

from asrkit.losses import ctc_loss

CASES = {  # B, T, U, V
    "ragged": (3, 12, 4, 6),
    "one frame": (2, 1, 1, 3),
    "no labels": (2, 5, 0, 4),
    "one label more than frames": (1, 3, 4, 5),
    "63 frames": (2, 63, 20, 9),
}


def batch(size, blank=-1):
    B, T, U, V = size
    generator = torch.Generator().manual_seed(T)
    logits = torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    targets = torch.randint(V - 1, (B, U), generator=generator)
    targets += targets >= blank % V
    frames = torch.linspace(T, 0.6 * T, B).long().clamp(min=1)
    labels = torch.linspace(U, 0.5 * U, B).long()
    return logits, targets, frames, labels


def torchs(log_probs, targets, frames, labels, blank):
    by_time = log_probs.transpose(0, 1)
    blank %= log_probs.shape[2]
    return F.ctc_loss(
        by_time, targets, frames, labels, blank, "none", zero_infinity=True
    )


def graded(loss, logits, *rest, blank=-1):
    """Losses, and the gradient of a weighted sum of them by the logits."""
    logits = logits.detach().requires_grad_()
    costs = loss(logits.log_softmax(-1), *rest, blank)
    weights = torch.arange(1.0, len(costs) + 1, dtype=costs.dtype)
    (grad,) = torch.autograd.grad((costs * weights).sum(), logits)
    return costs.detach(), grad


@pytest.mark.parametrize("blank", [-1, 0, 1])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name, blank):
    inputs = batch(CASES[name], blank)
    actual, expected = (
        graded(loss, *inputs, blank=blank) for loss in (ctc_loss, torchs)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_in_float32_the_error_is_at_most_twice_torchs():
    logits, *rest = batch((3, 200, 30, 20))
    exact = graded(torchs, logits, *rest)
    single = logits.float()
    ours, theirs = (graded(loss, single, *rest) for loss in (ctc_loss, torchs))
    for mine, rival, oracle in zip(ours, theirs, exact, strict=True):
        rivals_error = (rival - oracle).abs().max()
        own_error = (mine - oracle).abs().max()
        tiny = 1e-6 * oracle.abs().max()
        assert own_error <= 2 * rivals_error + tiny


def test_repeated_labels_need_a_blank_between_them():
    for frames, cost in ((2, 0.0), (3, 3 * math.log(3))):  # no alignment; one
        log_probs = torch.zeros(1, frames, 3).log_softmax(-1)
        targets = torch.tensor([[0, 0]])
        lengths = torch.tensor([frames])
        labels = torch.tensor([2])
        actual = ctc_loss(log_probs, targets, lengths, labels)
        assert actual.item() == pytest.approx(cost)


def test_the_contents_of_the_padding_do_not_matter():
    logits, targets, frames, labels = batch(CASES["ragged"])
    log_probs = logits.log_softmax(-1)
    plain = ctc_loss(log_probs, targets, frames, labels)
    for b in range(len(log_probs)):
        log_probs[b, frames[b] :] = math.nan
        targets[b, labels[b] :] = 10**6
    log_probs.requires_grad_()
    costs = ctc_loss(log_probs, targets, frames, labels)
    (grad,) = torch.autograd.grad(costs.sum(), log_probs)
    assert torch.equal(costs, plain)
    assert grad.isfinite().all()
    for b in range(len(grad)):
        assert (grad[b, frames[b] :] == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(1,), (1, 0), (1, 0, 0)])
def test_logits_that_are_not_finite_have_the_loss_of_torch(value, place):
    """NaN where a row has no probabilities, not 0; other utterances keep loss and gradient."""
    logits, targets, frames, labels = batch(CASES["ragged"])
    rest = targets, frames, labels
    plain, kept = graded(ctc_loss, logits, *rest)
    logits[place] = value
    actual, grad = graded(ctc_loss, logits, *rest)
    expected = torchs(logits.log_softmax(-1), *rest, -1)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert grad[1].isnan().any() == actual[1].isnan()
    others = torch.arange(len(actual)) != 1
    assert torch.equal(actual[others], plain[others])
    assert torch.equal(grad[others], kept[others])


@pytest.mark.parametrize("place", [(0, slice(None), 1), (0, 2)])
def test_a_label_or_frame_without_probability_has_no_alignment(place):
    """A label on all frames, or all tokens on a frame: loss and gradient are 0."""
    log_probs = torch.zeros(2, 4, 3).log_softmax(-1)
    log_probs[place] = -math.inf
    counts = torch.tensor([4, 4]), torch.tensor([2, 2])
    log_probs.requires_grad_()
    costs = ctc_loss(log_probs, torch.tensor([[0, 1], [0, 1]]), *counts)
    (grad,) = torch.autograd.grad(costs.sum(), log_probs)
    assert costs[0] == 0 < costs[1]
    assert (grad[0] == 0).all() and grad[1].isfinite().all()
