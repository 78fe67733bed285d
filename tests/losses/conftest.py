"""One thread for the small lattices of these tests; who tests threads asks for more. A check that losses share."""

import math

import pytest
import torch


@pytest.fixture(autouse=True)
def small_lattices(one_thread):
    """Every test of this folder starts on one thread."""


@pytest.fixture
def expect_padding_cannot_matter():
    """A check of value_and_gradient(logits, targets, frames, labels): NaN, infinity and wild labels change no bit."""

    def check(value_and_gradient, logits, targets, frames, labels):
        plain = value_and_gradient(logits, targets, frames, labels)
        for b in range(len(logits)):
            logits[b, frames[b] :] = math.nan
            logits[b, :, labels[b] + 1 :] = math.inf
            targets[b, labels[b] :] = -100 if b % 2 else 10**6
        cost, grad = value_and_gradient(logits, targets, frames, labels)
        torch.testing.assert_close(cost, plain[0], rtol=0, atol=0)
        torch.testing.assert_close(grad, plain[1], rtol=0, atol=0)
        for b in range(len(logits)):
            assert (grad[b, frames[b] :] == 0).all()
            assert (grad[b, :, labels[b] + 1 :] == 0).all()

    return check
