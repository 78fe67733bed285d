"""An LSTM predictor's step on folded weights: what the plain step gives, as exactly."""

from copy import deepcopy

import pytest
import torch

from asrkit.models import (
    ConvConfig,
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
)

V, D, B = 30, 24, 5


def model_of(layers, dtype=torch.float64, predictor=None):
    torch.manual_seed(layers)
    config = TransducerConfig(
        vocab_size=V - 1,
        encoder=ConvConfig(width=8, layers=1),
        predictor=predictor or LSTMConfig(width=D, layers=layers, dropout=0.3),
        joint_width=16,
    )
    model = TransducerModel(config).eval()
    for part in model.predictor.parameters():
        part.data.mul_(3)  # else no gate is far from a half
    return model.to(dtype).requires_grad_(False)


def steps(predict, model, count=6):
    """Predictions and states of `count` steps, from the state before any label."""
    draw = torch.Generator().manual_seed(1)
    _, state = model.predict(torch.full((B,), model.blank), None)
    found = []
    for _ in range(count):
        labels = torch.randint(0, V, (B,), generator=draw)
        predicted, state = predict(labels, state)
        found.append((predicted, *state))
    return found


def folded(model):
    tables = model.folded_predictor()
    tables.fold(model)
    return lambda labels, state: tables.predict(model, labels, state)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)]
)
def test_folded_steps_are_the_plain_ones(layers, dtype, tolerance):
    model = model_of(layers, dtype)
    plain = steps(model.predict, model)
    for found, wanted in zip(steps(folded(model), model), plain, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert (plain[0][0] - plain[-1][0]).abs().max() > 0.1  # the labels matter


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_in_bfloat16_folding_costs_no_accuracy(layers):
    model = model_of(layers, torch.bfloat16)
    exact = deepcopy(model).double()
    errors = {}
    for name, predict in (("plain", model.predict), ("folded", folded(model))):
        pairs = zip(steps(predict, model), steps(exact.predict, exact), strict=True)
        errors[name] = max(
            (a.double() - b).abs().max().item()
            for found, wanted in pairs
            for a, b in zip(found, wanted, strict=True)
        )
    assert 0 < errors["folded"] <= 2 * errors["plain"]


def test_weights_that_change_in_place_are_folded_anew_where_they_lie():
    model = model_of(2)
    tables = model.folded_predictor()
    tables.fold(model)
    address = tables.table.data_ptr(), tables.recurrent.data_ptr()
    for part in model.predictor.parameters():
        part.mul_(0.5)
    tables.fold(model)
    assert address == (tables.table.data_ptr(), tables.recurrent.data_ptr())
    found = steps(lambda labels, state: tables.predict(model, labels, state), model)
    for a, b in zip(found, steps(model.predict, model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_is_not_the_plain_lstm_is_not_folded():
    class Other(TransducerModel):
        def predict(self, labels, state=None):
            return super().predict(labels, state)

    model = model_of(2)
    assert model.folded_predictor() is not None
    model.__class__ = Other
    assert model.folded_predictor() is None
    assert model_of(2).train().folded_predictor() is None
    assert model_of(1, predictor=StatelessConfig(width=D)).folded_predictor() is None
    quantized = model_of(1)
    quantized.predictor.lstm = torch.nn.quantizable.LSTM(D, D)
    assert quantized.folded_predictor() is None
