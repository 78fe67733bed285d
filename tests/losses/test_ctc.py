"""The CTC loss by frames against torch's kernel, values and gradients."""

import math

import pytest
import torch
from torch.nn import functional as F

from asrkit.losses import ctc_loss

CASES = {
    "ragged": (3, 12, 4, 6),
    "one frame": (2, 1, 1, 3),
    "no labels": (2, 5, 0, 4),
    "one label more than frames": (1, 3, 4, 5),
    "63 frames": (2, 63, 20, 9),
}


def batch(size, dtype=torch.float64, blank=-1):
    B, T, U, V = size
    generator = torch.Generator().manual_seed(T)
    logits = torch.randn(B, T, V, dtype=dtype, generator=generator, requires_grad=True)
    targets = torch.randint(V - 1, (B, U), generator=generator)
    targets += targets >= blank % V
    frames = torch.linspace(T, 0.6 * T, B).long().clamp(min=1)
    labels = torch.linspace(U, 0.5 * U, B).long()
    return logits, targets, frames, labels


def both(arguments, blank=-1):
    """(value, gradient over the logits) of ours and of torch's."""
    logits, targets, frames, labels = arguments
    blank %= logits.shape[2]
    results = []
    for ours in (True, False):
        log_probs = logits.log_softmax(-1)
        if ours:
            costs = ctc_loss(log_probs, targets, frames, labels, blank)
        else:
            by_time = log_probs.transpose(0, 1)
            costs = F.ctc_loss(
                by_time, targets, frames, labels, blank, "none", zero_infinity=True
            )
        weights = torch.arange(1.0, len(costs) + 1, dtype=costs.dtype)
        (grad,) = torch.autograd.grad((costs * weights).sum(), logits)
        results.append((costs, grad))
    return results


@pytest.mark.parametrize("blank", [-1, 0, 1])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name, blank):
    ours, torchs = both(batch(CASES[name], blank=blank), blank)
    torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)


def test_in_float32_the_error_is_no_larger_than_twice_torchs():
    exact = both(batch((3, 200, 30, 20)))[1]
    logits, *rest = batch((3, 200, 30, 20))
    ours, torchs = both((logits.detach().float().requires_grad_(), *rest))
    for mine, theirs, oracle in zip(ours, torchs, exact, strict=True):
        limit = 2 * (theirs.double() - oracle).abs().max() + 1e-6 * oracle.abs().max()
        assert (mine.double() - oracle).abs().max() <= limit


def test_repeated_labels_need_a_blank_between_them():
    certain = torch.zeros(1, 2, 3).log_softmax(-1)
    two = torch.tensor([[0, 0]])
    loss = ctc_loss(certain, two, torch.tensor([2]), torch.tensor([2]))
    assert loss.tolist() == [0.0]  # no alignment of two frames
    three = torch.zeros(1, 3, 3).log_softmax(-1)
    loss = ctc_loss(three, two, torch.tensor([3]), torch.tensor([2]))
    assert loss.item() == pytest.approx(3 * math.log(3))


def test_what_lies_in_the_padding_cannot_matter():
    logits, targets, frames, labels = batch(CASES["ragged"])
    plain = both((logits, targets, frames, labels))[0]
    log_probs = logits.log_softmax(-1).detach()
    for b in range(len(log_probs)):
        log_probs[b, frames[b] :] = math.nan
        targets[b, labels[b] :] = 10**6
    log_probs.requires_grad_()
    costs = ctc_loss(log_probs, targets, frames, labels)
    (grad,) = torch.autograd.grad(costs.sum(), log_probs)
    assert torch.equal(costs, plain[0])
    assert grad.isfinite().all()
    for b in range(len(grad)):
        assert (grad[b, frames[b] :] == 0).all()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"log_probs": torch.zeros(2, 3)}, "log_probs: expected shape (B, T, V), got (2, 3)."),
        ({"targets": torch.tensor([[2, 0]])}, "targets: expected labels 0..2 but blank=2, got 2 in utterance 0."),
        ({"lengths": torch.tensor([5])}, "logit_lengths: expected 1 to T=4 frames, got 5 in utterance 0."),
        ({"blank": 3}, "blank: expected an index of V=3 tokens, got 3."),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(change, wanted):
    good = {
        "log_probs": torch.zeros(1, 4, 3).log_softmax(-1),
        "targets": torch.tensor([[0, 1]]),
        "lengths": torch.tensor([4]),
        "target_lengths": torch.tensor([2]),
    }
    with pytest.raises(ValueError) as caught:
        ctc_loss(**{**good, **change})
    assert str(caught.value) == wanted
