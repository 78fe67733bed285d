"""Averaged weights: against their sum, through exceptions, and over a restart."""

import pytest
import torch
from torch import nn

from asrkit.optim import Average


def drawn(count, seed=0):
    """Weights (3,) of `count` steps, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def averaged(values, average, weight):
    """The average after `weight` had each of the values."""
    for value in values:
        weight.copy_(value)
        average.update()
    return average.values["0"]


def test_it_is_the_sum_of_the_weights_by_age():
    first, *values = drawn(30)
    weight = first.clone()
    got = averaged(values, Average([weight], 0.9, warm_up=False), weight)
    wanted = 0.9 ** len(values) * first
    for age, value in enumerate(reversed(values)):
        wanted = wanted + 0.1 * 0.9**age * value
    assert torch.allclose(got, wanted, rtol=1e-12, atol=0)


def test_the_warm_up_forgets_the_first_weights_soon():
    first, *values = drawn(200)
    weight = first.clone()
    got = averaged(values, Average([weight], 0.95), weight)
    wanted = first
    for n, value in enumerate(values):
        decay = min(0.95, (1 + n) / (10 + n))
        wanted = decay * wanted + (1 - decay) * value
    assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-14)
    start = Average([torch.zeros(1)], 0.95)
    assert start.next_decay() == 0.1


@pytest.fixture
def model():
    """A module with weights, running averages in float and a count of batches."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    layers(torch.randn(5, 4))
    return layers


def values_of(model):
    """Copies of all values of a module."""
    return [value.clone() for value in model.state_dict().values()]


def test_integers_of_a_module_are_copied_and_floats_averaged(model):
    average = Average(model, 0.5, warm_up=False)
    before = values_of(model)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(2)
    average.update()
    names = [*model.state_dict()]
    assert [*average.values] == names and "1.num_batches_tracked" in names
    for value, start in zip(average.values.values(), before, strict=True):
        added = 1 if start.is_floating_point() else 2
        assert torch.allclose(value.double(), start.double() + added)


def test_weights_and_averages_change_places_and_return_bit_for_bit(model):
    average = Average(model, 0.9)
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    average.update()
    trained = values_of(model)
    mean = [value.clone() for value in average.values.values()]
    memory = [value.data_ptr() for value in model.state_dict().values()]
    with average.swapped():
        assert all(map(torch.equal, values_of(model), mean))
        assert [value.data_ptr() for value in model.state_dict().values()] == memory
    assert all(map(torch.equal, values_of(model), trained))
    assert all(map(torch.equal, average.values.values(), mean))


def test_an_exception_brings_the_weights_back(model):
    average = Average(model, 0.0, warm_up=False)
    with torch.no_grad():
        model[0].weight.add_(1)
    trained = values_of(model)
    with pytest.raises(KeyError), average.swapped():
        raise KeyError
    assert all(map(torch.equal, values_of(model), trained))
    average.update()  # it is usable again


def test_an_error_while_they_change_places_brings_the_weights_back(model):
    average = Average(model, 0.9)
    with torch.no_grad():
        model[0].weight.add_(1)
    trained = values_of(model)
    whole = average.values["1.weight"]
    average.values["1.weight"] = torch.zeros(7)  # does not fit, after two that do
    with pytest.raises(RuntimeError), average.swapped():
        pass
    average.values["1.weight"] = whole
    assert all(map(torch.equal, values_of(model), trained))


@pytest.mark.parametrize("name", ["update", "state_dict", "swapped"])
def test_what_would_mix_them_up_is_refused_while_they_are_swapped(model, name):
    average = Average(model, 0.9)
    calls = {
        "update": average.update,
        "state_dict": average.state_dict,
        "swapped": average.swapped().__enter__,
    }
    said = f"{name}: expected the weights in their place"
    with average.swapped(), pytest.raises(ValueError, match=said):
        calls[name]()


def test_tied_weights_change_places_once():
    layer = nn.Linear(3, 3)
    model = nn.ModuleList([layer, layer])
    average = Average(model, 0.5, warm_up=False)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(2)
    average.update()
    with average.swapped():
        assert torch.allclose(layer.weight.detach(), before + 1)
    assert torch.equal(layer.weight.detach(), before + 2)


def test_it_goes_on_bit_for_bit_from_its_saved_state(tmp_path):
    values = drawn(20)
    weight = torch.zeros(3, dtype=torch.float64)
    unbroken = averaged(values, Average([weight], 0.95), weight)
    weight = torch.zeros(3, dtype=torch.float64)
    half = Average([weight], 0.95)
    averaged(values[:7], half, weight)
    torch.save(half.state_dict(), tmp_path / "average.pt")
    resumed = Average([weight], 0.95)
    resumed.load_state_dict(torch.load(tmp_path / "average.pt", weights_only=True))
    assert torch.equal(averaged(values[7:], resumed, weight), unbroken)


@pytest.mark.parametrize("decay", [-0.1, 1.1, "0.9", True])
def test_a_wrong_decay_is_named(decay):
    with pytest.raises(ValueError, match="decay: expected a share from 0 to 1"):
        Average([torch.zeros(1)], decay)


def test_states_of_other_weights_and_no_weights_are_refused(model):
    with pytest.raises(
        ValueError, match="source: expected a module or tensors with weights, got none."
    ):
        Average([], 0.9)
    average = Average(model, 0.9)
    other = Average(nn.Linear(4, 3), 0.9).state_dict()
    with pytest.raises(
        ValueError,
        match="state_dict: expected averages of the same 7 weights, got others",
    ):
        average.load_state_dict(other)
    cut = average.state_dict()
    cut["values"]["0.bias"] = torch.zeros(2)
    with pytest.raises(ValueError, match="0.bias of shape \\(3,\\), got \\(2,\\)"):
        average.load_state_dict(cut)
