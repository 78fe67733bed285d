from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.models import (
    ConvConfig,
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
)

PREDICTORS = [
    StatelessConfig(width=12, context=1),
    StatelessConfig(width=12, context=3),
    LSTMConfig(width=12, layers=2),
]


def small(predictor=PREDICTORS[1], **settings) -> TransducerModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 28,
        "encoder": ConvConfig(width=16, layers=1),
        "joint_width": 10,
    }
    config = TransducerConfig(**sizes, predictor=predictor, **settings)
    return TransducerModel(config).eval()


@pytest.mark.parametrize("predictor", PREDICTORS, ids=repr)
@pytest.mark.parametrize("U", [0, 1, 6])
def test_stepping_through_labels_equals_teacher_forcing(predictor, U):
    model = small(predictor)
    targets = torch.randint(0, 28, (3, U))
    rows = model.rows(targets)
    predicted, state = model.predict(torch.full((3,), model.blank), None)
    steps = [predicted]
    for u in range(U):
        predicted, state = model.predict(targets[:, u], state)
        steps.append(predicted)
    torch.testing.assert_close(torch.stack(steps, 1), rows)


@pytest.mark.parametrize("predictor", PREDICTORS, ids=repr)
@pytest.mark.parametrize("padding", [-1, -100])
def test_targets_may_be_padded_with_negative_numbers(predictor, padding):
    model = small(predictor)
    targets = torch.randint(0, 28, (3, 6))
    padded = targets.clone()
    padded[1, 4:] = padding
    rows, wanted = model.rows(padded), model.rows(targets)
    assert torch.equal(rows[[0, 2]], wanted[[0, 2]])
    assert torch.equal(rows[1, :5], wanted[1, :5])


def test_durations_that_are_no_sequence_are_refused():
    with pytest.raises(ValueError, match="durations: expected a sequence"):
        TransducerConfig(vocab_size=5, durations=None)


def test_the_joint_of_the_whole_lattice_is_the_joint_of_its_cells():
    model = small()
    features = torch.randn(2, 20, 80)
    targets = torch.randint(0, 28, (2, 4))
    logits, lengths, ctc = model(features, torch.tensor([20, 13]), targets)
    encoded, _, _ = model.encode(features, torch.tensor([20, 13]))
    assert logits.shape == (2, 5, 5, 29)
    assert lengths.tolist() == [5, 4]
    wanted = model.join(encoded[1, 2], model.rows(targets)[1, 3])
    torch.testing.assert_close(logits[1, 2, 3], wanted)
    found = ctc.exp().sum(-1)
    torch.testing.assert_close(found, torch.ones(2, 5))


def test_logits_of_durations_follow_those_of_the_tokens():
    model = small(durations=(0, 1, 2, 4))
    plain = small()
    assert model.blank == plain.blank == 28
    weights = model.state_dict()
    for name in ("output.weight", "output.bias"):
        weights[name] = weights[name][:29]
    plain.load_state_dict(weights)
    batch = torch.randn(2, 20, 80), torch.tensor([20, 13]), torch.randint(0, 28, (2, 3))
    (found, _, ctc), (wanted, _, plain_ctc) = model(*batch), plain(*batch)
    assert found.shape == (2, 5, 4, 33)
    torch.testing.assert_close(found[..., :29], wanted)
    torch.testing.assert_close(ctc, plain_ctc)  # the CTC head has no durations


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_joint_is_the_named_activation_of_the_sum_and_one_linear_layer(activation):
    model = small(activation=activation)
    encoded = torch.randn(3, 1, 10)
    predicted = torch.randn(5, 10)
    hidden = getattr(torch, activation)(encoded + predicted)
    wanted = hidden @ model.output.weight.T + model.output.bias
    torch.testing.assert_close(model.join(encoded, predicted), wanted)


def as_if_on_a_gpu(model, dtype):
    """The same model with fakes of a GPU's weights: .to cannot move fakes."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(
                torch.zeros_like(value, device="cuda", dtype=dtype)
            )
    return model


@contextmanager
def cast_to(dtype):
    """torch.autocast("cuda", dtype), which turns itself off where there is no GPU."""
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.clear_autocast_cache()


@pytest.mark.parametrize(("dtype", "cast"), [
    (torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize(
    "predictor", [*PREDICTORS, LSTMConfig(width=12, layers=1)], ids=repr
)
def test_on_a_gpu_every_prediction_has_the_dtypes_of_the_first(predictor, dtype, cast):
    """cuDNN's LSTM, which is no cell, would turn to float16 under autocast to bfloat16 and need a driver at once."""
    with FakeTensorMode(), torch.inference_mode():
        model = as_if_on_a_gpu(small(predictor), dtype)
        blank = torch.full((4,), model.blank, device="cuda")
        with cast_to(cast):
            first, state = model.predict(blank, None)
            second, after = model.predict(blank, state)
            parts = [
                [*one] if isinstance(one, tuple) else [one] for one in (state, after)
            ]
    assert first.dtype == second.dtype == (cast or dtype)
    assert [part.dtype for part in parts[0]] == [part.dtype for part in parts[1]]
    assert [part.shape for part in parts[0]] == [part.shape for part in parts[1]]


def test_one_label_and_several_are_predicted_alike_and_teach_alike():
    model = small(PREDICTORS[2]).double()
    both = []
    for U in (0, 1):  # a cell, and nn.LSTM
        model.zero_grad()
        first = model.rows(torch.full((3, U), 7))[:, 0]
        first.square().sum().backward()
        both.append([first, *(weight.grad for weight in model.predictor.parameters())])
    torch.testing.assert_close(*both)
