"""Batch splitting: the whole batch's values and gradients from one sub-batch's joint at a time."""

import pytest
import torch

from asrkit.losses import rnnt_loss, split_batches, tdt_loss
from asrkit.workbench.measure import peak_memory

# no sub-batch is as long as the batch
FRAMES = torch.tensor([3, 6, 1, 5, 2])
LABELS = torch.tensor([4, 0, 2, 1, 3])


class Joint(torch.nn.Module):
    """tanh, dropout and a linear layer; it records the sizes of its inputs."""

    def __init__(self, D, V, dropout=0.0):
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.output = torch.nn.Linear(D, V)
        self.seen = []

    def forward(self, encoded, predicted):
        sizes = (len(encoded), encoded.shape[1], predicted.shape[1])
        self.seen.append(sizes)
        hidden = (encoded[:, :, None] + predicted[:, None]).tanh()
        return self.output(self.dropout(hidden))


def batch(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    joint = Joint(5, 7, dropout).to(dtype)
    sizes = (5, 6, 5), (5, 5, 5)
    halves = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    targets = torch.randint(0, 3, (5, 4))
    return joint, *halves, targets, FRAMES, LABELS


def differentiated(costs, joint, *halves):
    leaves = (*halves[:2], *joint.parameters())
    total = costs.sum() + costs.max()
    return costs.detach(), *torch.autograd.grad(total, leaves)


def whole(joint, encoded, predicted, *rest, loss=rnnt_loss, **options):
    costs = loss(joint(encoded, predicted), *rest, **options)
    return differentiated(costs, joint, encoded, predicted)


def split(*inputs, **options):
    return differentiated(split_batches(*inputs, **options), *inputs)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_values_and_gradients_are_those_of_the_whole_batch(size, reduction):
    inputs = batch()
    expected = whole(*inputs, reduction=reduction)
    actual = split(*inputs, size=size, reduction=reduction)
    torch.testing.assert_close(actual, expected)


def test_each_sub_batch_is_cut_to_its_own_longest_and_its_joint_runs_twice():
    joint, *rest = batch()
    costs = split_batches(joint, *rest, size=2)
    sizes = [(2, 6, 5), (2, 5, 3), (1, 2, 4)]
    assert joint.seen == sizes
    costs.backward()
    assert joint.seen == sizes + sizes[::-1]


@pytest.mark.parametrize(
    "loss, options",
    [
        (
            rnnt_loss,
            {"blank": 3, "clamp": 0.05, "fastemit_lambda": 0.1, "impl": "reference"},
        ),
        (tdt_loss, {"durations": (0, 1, 2), "sigma": 0.05}),
    ],
)
def test_options_reach_the_loss_and_any_transducer_loss_works(loss, options):
    inputs = batch()
    actual = split(*inputs, size=2, loss=loss, **options)
    expected = whole(*inputs, loss=loss, **options)
    torch.testing.assert_close(actual, expected)


def test_the_gradient_may_overwrite_the_logits_of_a_sub_batch():
    inputs = batch(torch.float32)
    actual = split(*inputs, size=2, overwrite_logits=True)
    torch.testing.assert_close(actual, whole(*inputs))


def test_dropout_in_the_joint_repeats_its_mask_in_backward():
    joint, *halves, targets, frames, labels = batch(dropout=0.5)
    options = {"reduction": "none"}
    torch.manual_seed(1)
    parts = []
    for b, (T, U) in enumerate(zip(frames.tolist(), labels.tolist(), strict=True)):
        one = slice(b, b + 1)
        encoded = halves[0][one, :T]
        predicted = halves[1][one, : U + 1]
        logits = joint(encoded, predicted)
        rest = targets[one, :U], frames[one], labels[one]
        parts.append(rnnt_loss(logits, *rest, **options))
    expected = differentiated(torch.cat(parts), joint, *halves)
    torch.manual_seed(1)
    actual = split(joint, *halves, targets, frames, labels, size=1, **options)
    torch.testing.assert_close(actual, expected)


def test_one_sub_batch_of_the_joint_exists_at_a_time():
    B, T, U, V, D = 8, 60, 19, 250, 8
    joint = Joint(D, V)
    sizes = (B, T, D), (B, U + 1, D)
    halves = [torch.randn(size, requires_grad=True) for size in sizes]
    targets = torch.randint(0, 9, (B, U))
    frames = torch.full((B,), T)
    labels = torch.full((B,), U)
    rest = targets, frames, labels
    logits = 4 * B * T * (U + 1) * V
    constant = 2**18  # gradients of halves and weights, lengths

    def whole():
        rnnt_loss(joint(*halves), *rest, impl="numba_cpu").backward()

    def split(size):
        options = {"size": size, "impl": "numba_cpu"}
        split_batches(joint, *halves, *rest, **options).backward()

    most = peak_memory(whole)
    # the logits with their gradient; the rest is the hidden layer
    assert most == pytest.approx(2 * logits, rel=0.2)
    for size in (8, 2, 1):
        peak = peak_memory(lambda size=size: split(size))
        assert peak == pytest.approx(size / B * most, rel=0.05, abs=constant)


def test_without_gradients_it_is_the_loss_alone():
    inputs = batch()
    with torch.no_grad():
        cost = split_batches(*inputs, size=2)
    assert not cost.requires_grad
    assert inputs[0].seen == [(2, 6, 5), (2, 5, 3), (1, 2, 4)]
    torch.testing.assert_close(cost, whole(*inputs)[0])
