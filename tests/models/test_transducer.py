import pytest
import torch

from asrkit.models import ConvConfig, FastConformerConfig, LSTMConfig, StatelessConfig, TransducerConfig, TransducerModel

PREDICTORS = [StatelessConfig(width=12, context=1), StatelessConfig(width=12, context=3), LSTMConfig(width=12, layers=2)]


def small(predictor=PREDICTORS[1], vocab_size=28, encoder=None) -> TransducerModel:
    torch.manual_seed(0)
    encoder = encoder or ConvConfig(width=16, layers=1)
    return TransducerModel(TransducerConfig(vocab_size=vocab_size, encoder=encoder, predictor=predictor, joint_width=10)).eval()


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


def test_the_joint_of_the_whole_lattice_is_the_joint_of_its_cells():
    model = small()
    features, targets = torch.randn(2, 20, 80), torch.randint(0, 28, (2, 4))
    logits, lengths, ctc = model(features, torch.tensor([20, 13]), targets)
    encoded, _, _ = model.encode(features, torch.tensor([20, 13]))
    assert logits.shape == (2, 5, 5, 29)
    assert lengths.tolist() == [5, 4]
    torch.testing.assert_close(logits[1, 2, 3], model.join(encoded[1, 2], model.rows(targets)[1, 3]))
    torch.testing.assert_close(ctc.exp().sum(-1), torch.ones(2, 5))


@pytest.mark.parametrize("make", [
    lambda: TransducerConfig(vocab_size=0), lambda: TransducerConfig(vocab_size=5, joint_width=0),
    lambda: ConvConfig(kernel=-1), lambda: ConvConfig(layers=-1), lambda: FastConformerConfig(heads=0),
])  # fmt: skip
def test_sizes_below_one_are_refused_at_birth(make):
    with pytest.raises(ValueError, match="expected (sizes of )?at least 1"):
        make()


def tdt(activation="tanh", durations=(0, 1, 2, 4)) -> TransducerModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 28, "encoder": ConvConfig(width=16, layers=1), "predictor": PREDICTORS[0], "joint_width": 10}
    return TransducerModel(TransducerConfig(durations=durations, activation=activation, **sizes)).eval()


def test_durations_have_logits_behind_those_of_the_tokens_and_leave_the_rest_as_it_is():
    model, plain = tdt(), tdt(durations=())
    assert model.blank == plain.blank == 28 and model.output.out_features == 29 + 4 and plain.output.out_features == 29
    features, targets = torch.randn(2, 20, 80), torch.randint(0, 28, (2, 3))
    weights = model.state_dict()
    cut = weights | {name: weights[name][:29] for name in ("output.weight", "output.bias")}
    plain.load_state_dict(cut)
    both = [one(features, torch.tensor([20, 13]), targets) for one in (model, plain)]
    assert both[0][0].shape == (2, 5, 4, 33)
    torch.testing.assert_close(both[0][0][..., :29], both[1][0])
    torch.testing.assert_close(both[0][2], both[1][2])  # the CTC head knows no durations


@pytest.mark.parametrize(("activation", "function"), [("tanh", torch.tanh), ("relu", torch.relu)])
def test_the_joint_is_the_named_activation_of_the_sum_and_one_linear_layer(activation, function):
    model, encoded, predicted = tdt(activation), torch.randn(3, 1, 10), torch.randn(5, 10)
    wanted = function(encoded + predicted) @ model.output.weight.T + model.output.bias
    torch.testing.assert_close(model.join(encoded, predicted), wanted)


@pytest.mark.parametrize("durations", [(0,), (-1, 2), (1, 1), (0.5, 1), (True, 2), "12", (0, 1001), {0, 1}, None, 1])
def test_durations_that_describe_no_lattice_are_refused_at_birth(durations):
    with pytest.raises(ValueError, match="^durations: expected distinct whole numbers of frames up to 1000, one above 0, got "):
        TransducerConfig(vocab_size=5, durations=durations)


def test_an_unknown_activation_is_refused_at_birth():
    with pytest.raises(ValueError, match="^activation: expected 'tanh' or 'relu', got 'gelu'.$"):
        TransducerConfig(vocab_size=5, activation="gelu")
