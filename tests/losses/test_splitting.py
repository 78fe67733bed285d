"""Batch splitting: the whole batch's values and gradients from one sub-batch's joint at a time."""

import pytest
import torch

from asrkit.losses import rnnt_loss, split_batches, tdt_loss
from asrkit.models import ConvConfig, TransducerConfig, TransducerModel
from asrkit.workbench.measure import peak_memory

FRAMES, LABELS = (
    torch.tensor([3, 6, 1, 5, 2]),
    torch.tensor([4, 0, 2, 1, 3]),
)  # no sub-batch is as long as the batch


class Joint(torch.nn.Module):
    """tanh, dropout and a linear layer, which counts the utterances it has seen."""

    def __init__(self, D, V, dropout=0.0):
        super().__init__()
        self.dropout, self.output, self.seen = (
            torch.nn.Dropout(dropout),
            torch.nn.Linear(D, V),
            [],
        )

    def forward(self, encoded, predicted):
        self.seen.append((len(encoded), encoded.shape[1], predicted.shape[1]))
        return self.output(
            self.dropout((encoded[:, :, None] + predicted[:, None]).tanh())
        )


def batch(dtype=torch.float64, D=5, V=7, dropout=0.0):
    torch.manual_seed(0)
    joint = Joint(D, V, dropout).to(dtype)
    encoded, predicted = (
        torch.randn(5, size, D, dtype=dtype, requires_grad=True) for size in (6, 5)
    )
    return joint, encoded, predicted, torch.randint(0, 3, (5, 4)), FRAMES, LABELS


def differentiated(costs, joint, *halves):
    return costs.detach(), *torch.autograd.grad(
        costs.sum() + costs.max(), (*halves[:2], *joint.parameters())
    )


def whole(joint, encoded, predicted, *rest, loss=rnnt_loss, **options):
    return differentiated(
        loss(joint(encoded, predicted), *rest, **options), joint, encoded, predicted
    )


def split(*given, **options):
    return differentiated(split_batches(*given, **options), *given)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_values_and_gradients_are_those_of_the_whole_batch(size, reduction):
    given = batch()
    for wanted, got in zip(
        whole(*given, reduction=reduction),
        split(*given, size=size, reduction=reduction),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_each_sub_batch_is_cut_to_its_own_longest_and_its_joint_is_made_twice():
    joint, *rest = batch()
    costs = split_batches(joint, *rest, size=2)
    made = [(2, 6, 5), (2, 5, 3), (1, 2, 4)]
    assert joint.seen == made
    costs.backward()
    assert joint.seen == made + made[::-1]


@pytest.mark.parametrize("loss, options", [
    (rnnt_loss, {"blank": 3, "clamp": 0.05, "fastemit_lambda": 0.1, "impl": "reference"}),
    (tdt_loss, {"durations": (0, 1, 2), "sigma": 0.05}),
])  # fmt: skip
def test_options_go_to_the_loss_and_any_transducer_loss_will_do(loss, options):
    given = batch()
    for wanted, got in zip(
        whole(*given, loss=loss, **options),
        split(*given, size=2, loss=loss, **options),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_the_gradient_may_lie_over_the_logits_of_a_sub_batch():
    given = batch(torch.float32)
    for wanted, got in zip(
        whole(*given), split(*given, size=2, overwrite_logits=True), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_dropout_in_the_joint_repeats_its_mask_in_backward():
    joint, encoded, predicted, targets, *lengths = batch(dropout=0.5)
    torch.manual_seed(1)
    parts = [rnnt_loss(joint(encoded[b : b + 1, :T], predicted[b : b + 1, : U + 1]), targets[b : b + 1, :U],
                       FRAMES[b : b + 1], LABELS[b : b + 1], reduction="none")
             for b, (T, U) in enumerate(zip(FRAMES.tolist(), LABELS.tolist(), strict=True))]  # fmt: skip
    wanted = differentiated(torch.cat(parts), joint, encoded, predicted)
    torch.manual_seed(1)
    for got, one in zip(
        split(joint, encoded, predicted, targets, *lengths, size=1, reduction="none"),
        wanted,
        strict=True,
    ):
        torch.testing.assert_close(got, one)


def test_the_model_joins_through_a_lambda_and_its_encoder_learns():
    model = TransducerModel(
        TransducerConfig(
            vocab_size=6,
            encoder=ConvConfig(width=8, layers=1, dropout=0.0),
            joint_width=8,
        )
    )
    features, targets, labels = (
        torch.randn(3, 40, 80),
        torch.randint(0, 6, (3, 2)),
        torch.tensor([2, 1, 0]),
    )
    grads = []
    for size in (None, 2):
        encoded, frames, _ = model.encode(features, torch.tensor([40, 24, 12]))
        given = encoded, model.rows(targets)

        def join(encoded, predicted):
            return model.join(encoded[:, :, None], predicted[:, None])

        cost = split_batches(join, *given, targets, frames, labels, size=size) if size else \
            rnnt_loss(join(*given), targets, frames, labels)  # fmt: skip
        parts = [
            p for name, p in model.named_parameters() if not name.startswith("ctc_head")
        ]
        grads.append((cost.detach(), *torch.autograd.grad(cost, parts)))
    for wanted, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted)


def test_one_sub_batch_of_the_joint_exists_at_a_time_in_both_passes():
    B, T, U, V, D = 8, 60, 19, 250, 8
    joint = Joint(D, V)
    halves = (
        torch.randn(B, T, D, requires_grad=True),
        torch.randn(B, U + 1, D, requires_grad=True),
    )
    rest = torch.randint(0, 9, (B, U)), torch.full((B,), T), torch.full((B,), U)
    logits, constant = (
        4 * B * T * (U + 1) * V,
        2**18,
    )  # the constant: gradients of halves and weights, lengths

    def forward(size):
        return peak_memory(
            lambda: split_batches(joint, *halves, *rest, size=size, impl="numba_cpu")
        )

    def both(size):
        return peak_memory(
            lambda: split_batches(
                joint, *halves, *rest, size=size, impl="numba_cpu"
            ).backward()
        )

    dense = peak_memory(
        lambda: rnnt_loss(joint(*halves), *rest, impl="numba_cpu").backward()
    )
    one, two = logits, 2 * logits  # the logits; with their gradient
    assert dense == pytest.approx(two, rel=0.2)  # the rest is the hidden layer
    for size in (8, 2, 1):
        assert one * size / B <= forward(size) <= 1.2 * one * size / B + constant
        assert both(size) == pytest.approx(dense * size / B, rel=0.05, abs=constant)


def test_without_gradients_it_is_the_loss_alone():
    given = batch()
    with torch.no_grad():
        cost = split_batches(*given, size=2)
    assert not cost.requires_grad
    torch.testing.assert_close(cost, whole(*given)[0])
    assert given[0].seen[:3] == [(2, 6, 5), (2, 5, 3), (1, 2, 4)]


@pytest.mark.parametrize("change, wanted", [
    ({"size": 0}, "size: expected a number of utterances, at least 1, got 0."),
    ({"reduction": "max"}, "reduction: expected one of 'none', 'mean', 'sum', got 'max'."),
    ({"encoded": torch.zeros(5, 6)}, "encoded: expected shape (B, T, D), got (5, 6)."),
])  # fmt: skip
def test_bad_input_is_one_line_before_the_joint_is_made(change, wanted):
    names = (
        "joint",
        "encoded",
        "predicted",
        "targets",
        "logit_lengths",
        "target_lengths",
    )
    good = dict(zip(names, batch(), strict=True), size=2)
    with pytest.raises(ValueError) as error:
        split_batches(**{**good, **change})
    assert str(error.value) == wanted
    assert good["joint"].seen == []
