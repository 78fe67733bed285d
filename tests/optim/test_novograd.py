"""NovoGrad against its formula in float64, and against itself in other ways to run it."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.optim import Lamb, NovoGrad

sys.path.insert(0, str(Path(__file__).parent))
import runs
from runs import errors
from watching import Reads, Waits

IMPLS = ("reference", "foreach")
SHAPES = [(33, 17), (5,), (), (2, 3, 4), (0,), (1,)]
STEPS = 50


def drawn(seed, dtype=torch.float32, shapes=SHAPES):
    """Random tensors whose values float32 holds."""
    return runs.drawn(shapes, seed, dtype)


def oracle(steps_of_gradients, lr, *, betas=(0.95, 0.0), eps=1e-8, weight_decay=1e-3, average=False):  # fmt: skip
    """The weights after all steps, in float64, each number of the formula a number of Python."""
    weights = drawn(0, torch.float64)
    momenta = [torch.zeros_like(weight) for weight in weights]
    second = [None] * len(weights)
    for gradients in steps_of_gradients:
        for i, gradient in enumerate(gradients):
            square = float((gradient.double() ** 2).sum())
            if second[i] is None:
                second[i] = square
            else:
                second[i] = betas[1] * second[i] + (1 - betas[1]) * square
            added = (
                gradient.double() / (math.sqrt(second[i]) + eps)
                + weight_decay * weights[i]
            )
            if average:
                added = (1 - betas[0]) * added
            momenta[i] = betas[0] * momenta[i] + added
            weights[i] = weights[i] - lr * momenta[i]
    return weights


def trained(impl, steps_of_gradients, lr=0.01, dtype=torch.float32, **settings):
    """The parameters and the optimizer after all steps."""
    return runs.trained(
        NovoGrad, SHAPES, steps_of_gradients, lr, dtype, impl=impl, **settings
    )


OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"betas": (0.9, 0.25)},
    {"betas": (0.0, 0.98)},
    {"average": True, "weight_decay": 0.1},
    {"eps": 0.3},
    {"eps": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fifty_steps_of_every_implementation_are_the_formula(options):
    steps = [drawn(seed) for seed in range(1, STEPS + 1)]
    exact = oracle(steps, 0.01, **options)
    for impl in IMPLS:
        in_float64, _ = trained(impl, steps, dtype=torch.float64, **options)
        assert max(errors(in_float64, exact)) < 1e-12, impl
    plain, _ = trained("reference", steps, **options)
    parameters, _ = trained("foreach", steps, **options)
    for got, allowed in zip(
        errors(parameters, exact), errors(plain, exact), strict=True
    ):
        assert got <= 2 * allowed + 1e-6


def test_the_first_step_is_as_long_as_the_rate_whatever_the_gradient():
    for gradient in (torch.tensor([3.0, 4.0]), torch.tensor([3e-9, 4e-9])):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = gradient
        NovoGrad([parameter], 0.5, betas=(0.95, 0.98), eps=0.0).step()
        assert torch.allclose(parameter.detach(), torch.tensor([-0.3, -0.4]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("factor", [1e4, 1e-4])
@pytest.mark.parametrize("betas", [(0.95, 0.0), (0.9, 0.5)])
def test_the_scale_of_the_gradients_changes_nothing(impl, factor, betas):
    steps = [drawn(seed, torch.float64) for seed in range(1, 11)]
    scaled = [[factor * gradient for gradient in gradients] for gradients in steps]
    settings = {"dtype": torch.float64, "betas": betas, "weight_decay": 0.0, "eps": 0.0}
    parameters, _ = trained(impl, scaled, **settings)
    wanted, _ = trained(impl, steps, **settings)
    assert max(errors(parameters, [p.detach() for p in wanted])) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("eps", [0.0, 1e-40, 1e-8])
@pytest.mark.parametrize("beta2", [0.0, 0.5])
def test_a_gradient_of_zeros_moves_by_momentum_and_decay_alone(impl, eps, beta2):
    # 1e-40 has no inverse in float32
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = NovoGrad([parameter], 0.1, betas=(0.5, beta2), eps=eps, weight_decay=0.01, impl=impl)  # fmt: skip
    for _ in range(2):
        parameter.grad = torch.zeros(2)
        optimizer.step()
    first = 1 - 0.1 * 0.01
    second = first - 0.1 * (0.5 * 0.01 + 0.01 * first)
    assert torch.allclose(parameter.detach(), second * torch.tensor([1.0, -2.0]))
    assert optimizer.state[parameter]["step"] == 2


def state_bits(parameters, optimizer):
    """Every bit of weights and state, as integers."""
    tensors = [parameter.detach() for parameter in parameters]
    for parameter in parameters:
        tensors += optimizer.state[parameter].values()
    return [tensor.clone().reshape(-1).view(torch.int32) for tensor in tensors]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_gradient_that_is_not_finite_changes_no_bit(impl, bad, good_steps):
    # 3e38 is finite, but its norm overflows; -0.0 is a value that + 0.0 would change
    parameters = [
        nn.Parameter(torch.tensor([-0.0, 0.5, -3.0])),
        nn.Parameter(torch.zeros(2)),
    ]
    optimizer = NovoGrad(parameters, 0.1, impl=impl)
    for _ in range(good_steps):
        parameters[0].grad = torch.tensor([-0.0, 1.0, 2.0])
        parameters[1].grad = torch.tensor([0.0, -0.0])
        optimizer.step()
        optimizer.state[parameters[0]]["exp_avg"][0] = -0.0
    gradients = [torch.tensor([bad, 1.0, 0.0]), torch.tensor([1.0, -1.0])]
    before = None
    if good_steps:
        before = state_bits(parameters, optimizer)
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        bits = state_bits(parameters, optimizer)
        if before is None:  # the state was made by this step
            assert not any(some.any() for some in bits[2:])
        else:
            assert all(map(torch.equal, bits, before))
        before = bits
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(parameter.grad.nan_to_num(), gradient.nan_to_num())


@pytest.mark.parametrize("impl", IMPLS)
def test_the_step_after_a_skipped_first_one_is_a_first_step(impl):
    good = [drawn(seed) for seed in (1, 2)]
    bad = drawn(3)
    bad[0][0, 0] = math.nan
    settings = {
        "betas": (0.95, 0.9)
    }  # where v of the first step is not an average with 0
    parameters, optimizer = trained(impl, [bad, good[0], bad, good[1]], **settings)
    wanted, wanted_optimizer = trained(impl, good, **settings)
    got_bits = state_bits(parameters, optimizer)
    assert all(map(torch.equal, got_bits, state_bits(wanted, wanted_optimizer)))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_parameter_without_a_gradient_stays_and_does_not_age(impl):
    moved = nn.Parameter(torch.ones(3))
    resting = nn.Parameter(torch.ones(3))
    optimizer = NovoGrad([moved, resting], 0.1, impl=impl, betas=(0.95, 0.9))
    optimizer.step()  # none has one
    moved.grad = torch.ones(3)
    optimizer.step()
    assert (
        torch.equal(resting.detach(), torch.ones(3)) and resting not in optimizer.state
    )
    assert optimizer.state[moved]["step"] == 1
    resting.grad = torch.ones(3)
    optimizer.step()
    assert (
        optimizer.state[resting]["exp_avg_sq"] == 3
    )  # its first step, when it comes, is one


@pytest.mark.parametrize("impl", IMPLS)
def test_groups_keep_their_settings(impl):
    together = [nn.Parameter(weight) for weight in drawn(0, shapes=[(6,), (4,)])]
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in together]
    changes = [
        {"weight_decay": 0.0, "betas": (0.5, 0.5)},
        {"lr": 0.2, "average": True, "eps": 0.1},
    ]
    groups = [
        {"params": [one]} | change
        for one, change in zip(together, changes, strict=True)
    ]
    optimizer = NovoGrad(groups, 0.01, impl=impl)
    singles = [
        NovoGrad([one], impl="reference", **({"lr": 0.01} | change))
        for one, change in zip(alone, changes, strict=True)
    ]
    for seed in (1, 2, 3):
        for index, gradient in enumerate(drawn(seed, shapes=[(6,), (4,)])):
            together[index].grad = gradient
            alone[index].grad = gradient
            singles[index].step()
        optimizer.step()
    for got, wanted in zip(together, alone, strict=True):
        assert torch.allclose(got.detach(), wanted.detach(), rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_step_reads_a_value_on_the_host(impl):
    rate = torch.tensor(0.1)
    parameters = [nn.Parameter(weight) for weight in drawn(0)]
    optimizer = NovoGrad(parameters, rate, impl=impl)
    with Waits() as seen, Reads():
        for seed in (1, 2):
            for parameter, gradient in zip(parameters, drawn(seed), strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert seen.names == []
    with Waits() as seen:
        bool(optimizer.state[parameters[0]]["exp_avg_sq"] == 0)
    assert seen.names == ["_local_scalar_dense"]  # the test can fail


def test_a_rate_that_is_filled_or_scheduled_is_followed():
    rate = torch.tensor(0.0)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = NovoGrad([parameter], rate, betas=(0.0, 0.0), weight_decay=0.0)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(1))
    rate.fill_(0.1)
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.tensor([0.9]))
    optimizer.param_groups[0]["lr"] = 0.5  # as a loop of training does
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.tensor([0.4]))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_run_goes_on_bit_for_bit_from_its_saved_state(impl, tmp_path):
    steps = [drawn(seed) for seed in range(1, 5)]
    settings = {"betas": (0.9, 0.5), "average": True}
    unbroken, _ = trained(impl, steps, **settings)
    parameters, optimizer = trained(impl, steps[:2], **settings)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    rate = torch.tensor(9.0)
    resumed = NovoGrad(parameters, rate, impl=impl, betas=(0.1, 0.1), weight_decay=9.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.param_groups[0]["lr"] is rate  # the caller's, and a graph's
    for gradients in steps[2:]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        resumed.step()
    assert all(map(torch.equal, parameters, unbroken))


def test_the_state_of_another_optimizer_is_refused():
    parameters, _ = trained("foreach", [])
    others = [nn.Parameter(weight) for weight in drawn(0)]
    lamb = Lamb(others, 0.1, betas=(0.9, 0.9), weight_decay=0.0, impl="foreach")
    for other, gradient in zip(others, drawn(1), strict=True):
        other.grad = gradient
    lamb.step()
    said = r"expected the state of a NovoGrad, got one without \['average'\]\."
    with pytest.raises(ValueError, match=said):
        NovoGrad(parameters, 0.1).load_state_dict(lamb.state_dict())


@pytest.mark.parametrize(("damage", "said"), [
    (lambda saved: saved.pop("state"), "state_dict: expected one of an optimizer"),
    (lambda saved: saved["param_groups"][0].pop("betas"), "of a NovoGrad, got one without ['betas']."),
    (lambda saved: saved["param_groups"][0].update(lr=-1.0), "lr: expected at least 0, and finite, got -1.0."),
    (lambda saved: saved["param_groups"][0].update(betas=(2, 0)), "betas: expected two numbers"),
    (lambda saved: saved["state"][0].pop("exp_avg"), "exp_avg of shape (33, 17) for parameter 0, got NoneType."),
    (lambda saved: saved["state"][0].pop("step"), "step of shape () for parameter 0, got NoneType."),
    (lambda saved: saved["state"][0].update(exp_avg_sq=3.0), "exp_avg_sq of shape () for parameter 0, got float."),
    (lambda saved: saved["state"][0].update(exp_avg_sq=torch.zeros(3)), "exp_avg_sq of shape () for parameter 0, got (3,)."),
])  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(damage, said):
    parameters, optimizer = trained("foreach", [drawn(1)])
    saved = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    other = NovoGrad(parameters, 0.5, betas=(0.5, 0.5))
    with pytest.raises(ValueError) as raised:
        other.load_state_dict(saved)
    assert said in str(raised.value)
    assert other.param_groups[0]["betas"] == (0.5, 0.5)
    assert float(other.param_groups[0]["lr"]) == 0.5
    assert not other.state


def test_a_group_without_parameters_is_refused():
    with pytest.raises(
        ValueError, match="^params: expected a parameter in each group, got none"
    ):
        NovoGrad([{"params": [nn.Parameter(torch.ones(2))]}, {"params": []}], 0.1)


@pytest.mark.parametrize(("wrong", "said"), [
    ({"betas": (0.95, 1)}, "betas: expected two numbers from 0 to below 1, got (0.95, 1)."),
    ({"betas": (0.95, 1.0)}, "betas: expected two"),
    ({"betas": (0.95, -0.1)}, "betas: expected two"),
    ({"betas": (1.5, 0.0)}, "betas: expected two"),
    ({"betas": 0.95}, "betas: expected two"),
    ({"lr": -0.1}, "lr: expected at least 0, and finite, got -0.1."),
    ({"lr": 1e300}, "lr: expected at least 0, and finite, got 1e+300."),
    ({"lr": math.inf}, "lr: expected at least 0, and finite, got inf."),
    ({"eps": 10**400}, "eps: expected at least 0, and finite, got 1000"),
    ({"eps": -1e-9}, "eps: expected at least 0"),
    ({"eps": math.nan}, "eps: expected at least 0"),
    ({"weight_decay": math.inf}, "weight_decay: expected at least 0"),
    ({"average": 1}, "average: expected True or False, got 1."),
    ({"impl": "numba_cpu"}, "impl: expected one of 'foreach', 'reference', got 'numba_cpu'."),
])  # fmt: skip
def test_a_wrong_setting_is_named(wrong, said):
    with pytest.raises(ValueError) as raised:
        NovoGrad([nn.Parameter(torch.ones(2))], **({"lr": 0.1} | wrong))
    assert said in str(raised.value)


def test_sparse_gradients_are_refused_before_anything_is_written():
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = NovoGrad(embedding.parameters(), 0.1)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match="params: expected dense gradients, got a sparse one."
    ):
        optimizer.step()
    assert torch.equal(embedding.weight.detach(), before)


def test_parameters_in_half_precision_are_refused():
    with pytest.raises(
        ValueError, match="params: expected float32 or float64, got torch.bfloat16"
    ):
        NovoGrad([nn.Parameter(torch.ones(2).bfloat16())], 0.1)
