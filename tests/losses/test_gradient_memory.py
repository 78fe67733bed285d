"""A large gradient reuses memory of an earlier one, but never memory that a tensor still uses."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asrkit.losses import release_gradient_memory, rnnt_loss
from asrkit.memory import peak_memory

SHAPE = (1, 40, 11, 20_000)  # 35.2 MB, above what malloc reuses


@pytest.fixture(autouse=True)
def nothing_kept():
    release_gradient_memory()
    yield
    release_gradient_memory()


def drawn(seed, frames=40):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, frames, *SHAPE[2:])
    return torch.randn(shape, generator=generator, requires_grad=True)


def loss_of(logits):
    _, T, U1, _ = logits.shape
    targets = torch.arange(1, U1)[None]
    lengths = torch.tensor([T]), torch.tensor([U1 - 1])
    return rnnt_loss(logits, targets, *lengths, blank=0)


def gradient(logits):
    return torch.autograd.grad(loss_of(logits), logits)[0]


def test_the_next_gradient_reuses_the_memory_of_the_last_and_has_its_own_values():
    first = gradient(drawn(0))
    address = first.data_ptr()
    del first
    for frames in (40, 39):  # a smaller one fits too
        logits = drawn(1, frames)
        second = gradient(logits)
        assert second.data_ptr() == address
        assert torch.equal(second, gradient(logits))  # in other memory
        del second


@pytest.mark.parametrize(
    "part", [lambda grad: grad, lambda grad: grad[0, 3, :1].unbind()[0]]
)
def test_memory_that_a_tensor_uses_is_not_reused(part):
    held = part(gradient(drawn(0)))
    before = held.clone()
    other = gradient(drawn(1))
    assert other.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()
    assert torch.equal(held, before)


def test_gradients_of_two_threads_do_not_share_memory():
    logits = [drawn(seed) for seed in range(2)]
    expected = [gradient(one).clone() for one in logits]
    with ThreadPoolExecutor(2) as threads:
        actual = [*threads.map(gradient, logits)]
    assert actual[0].data_ptr() != actual[1].data_ptr()
    assert all(map(torch.equal, actual, expected))


def test_the_gradient_of_a_leaf_accumulates():
    logits = drawn(0)
    once = gradient(logits).clone()
    for _ in range(2):
        loss_of(logits).backward()
    torch.testing.assert_close(logits.grad, 2 * once)


def test_peak_memory_counts_the_gradient_in_every_call():
    logits = drawn(0)
    peaks = [peak_memory(lambda: gradient(logits)) for _ in range(2)]
    assert peaks[0] == peaks[1] > logits.nbytes
