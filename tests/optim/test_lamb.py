"""LAMB against its formula in float64, against apex's few lines, and against itself in other ways to run it."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.optim import Lamb, numba_cpu

sys.path.insert(0, str(Path(__file__).parent))
import runs
from runs import drawn, errors
from watching import Reads, Waits

IMPLS = ("reference", "foreach", "numba_cpu")
SHAPES = [(33, 17), (5,), (), (2, 3, 4), (0,), (numba_cpu.BLOCK - 1,), (numba_cpu.BLOCK,), (numba_cpu.BLOCK + 1,)]  # fmt: skip
PUBLISHED = {"betas": (0.9, 0.9985), "eps": 1e-9, "weight_decay": 1e-3}


def oracle(weights, steps_of_gradients, lr, *, betas, eps, weight_decay, clip=1.0, ratio="decayed", bias_correction=True):  # fmt: skip
    """The weights after all steps, in float64, as the formula is written."""
    weights = [weight.double().clone() for weight in weights]
    exp_avgs = [torch.zeros_like(weight) for weight in weights]
    exp_avg_sqs = [torch.zeros_like(weight) for weight in weights]
    for step, gradients in enumerate(steps_of_gradients, 1):
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
        for weight, gradient, m, v in zip(
            weights, gradients, exp_avgs, exp_avg_sqs, strict=True
        ):
            g = gradient.double() / max(1.0, norm / clip)
            m.copy_(betas[0] * m + (1 - betas[0]) * g)
            v.copy_(betas[1] * v + (1 - betas[1]) * g**2)
            unbiased_m, unbiased_v = m, v
            if bias_correction:
                unbiased_m, unbiased_v = (
                    m / (1 - betas[0] ** step),
                    v / (1 - betas[1] ** step),
                )
            update = unbiased_m / (unbiased_v**0.5 + eps) + weight_decay * weight
            scale = 1.0
            if (
                (weight_decay or ratio == "all")
                and weight.norm() > 0
                and update.norm() > 0
            ):
                scale = float(weight.norm() / update.norm())
            weight -= lr * scale * update
    return weights


def trained(impl, steps_of_gradients, lr=0.01, dtype=torch.float32, **settings):
    """The parameters and the optimizer after all steps."""
    return runs.trained(
        Lamb, SHAPES, steps_of_gradients, lr, dtype, impl=impl, **settings
    )


OPTIONS = [
    {},
    {"clip": 1e4},
    {"clip": math.inf},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "ratio": "all"},
    {"bias_correction": False},
    {"betas": (0.0, 0.5)},
    {"eps": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_implementation_is_the_formula(options):
    steps = [drawn(SHAPES, seed) for seed in range(1, 5)]
    settings = PUBLISHED | options
    exact = oracle(drawn(SHAPES, 0), steps, 0.01, **settings)
    in_float64, _ = trained("reference", steps, dtype=torch.float64, **settings)
    assert max(errors(in_float64, exact)) < 1e-12
    plain, _ = trained("reference", steps, **settings)
    for impl in ("foreach", "numba_cpu"):
        parameters, _ = trained(impl, steps, **settings)
        for got, allowed in zip(
            errors(parameters, exact), errors(plain, exact), strict=True
        ):
            assert got <= 2 * allowed + 1e-7, impl
    in_float64, _ = trained("foreach", steps, dtype=torch.float64, **settings)
    assert max(errors(in_float64, exact)) < 1e-12


def test_one_step_is_what_apex_computes():
    # test_lamb.py of apex: clip over all tensors, then per tensor; written here for one step
    weights = drawn([(7, 3), (4,)], 0)
    gradients = drawn([(7, 3), (4,)], 1)
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = Lamb(parameters, 0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    clipped = max(1.0, float(torch.cat([g.flatten() for g in gradients]).norm()))
    for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
        # after one step both bias corrections leave the gradient itself: m^ = g, v^ = g^2
        g = gradient / clipped
        update = g / (g.abs() + 1e-6) + 0.01 * weight
        wanted = weight - 0.1 * weight.norm() / update.norm() * update
        assert torch.allclose(parameter.detach(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_ratio_is_1_where_a_norm_is_0(impl):
    zero = nn.Parameter(torch.zeros(3))
    still = nn.Parameter(torch.ones(3))
    optimizer = Lamb([zero, still], 0.5, impl=impl, ratio="all", betas=(0.9, 0.9), weight_decay=0.0, eps=1e-9)  # fmt: skip
    zero.grad = torch.tensor([0.5, -0.5, 0.5])
    still.grad = torch.zeros(3)
    optimizer.step()
    assert torch.allclose(
        zero.detach(), torch.tensor([-0.5, 0.5, -0.5])
    )  # Adam's first step: lr
    assert torch.equal(still.detach(), torch.ones(3))


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
    # 3e38 is finite, but its norm overflows; -0.0 is a value that + 0.0 would change, and that an
    # average which decays reaches
    parameters = [
        nn.Parameter(torch.tensor([-0.0, 0.5, -3.0])),
        nn.Parameter(torch.zeros(2)),
    ]
    optimizer = Lamb(parameters, 0.1, impl=impl, **PUBLISHED)
    for _ in range(good_steps):
        parameters[0].grad = torch.tensor([-0.0, 1.0, 2.0])
        parameters[1].grad = torch.tensor([0.0, -0.0])
        optimizer.step()
        optimizer.state[parameters[0]]["exp_avg"][0] = -0.0
    gradients = [torch.tensor([bad, 1.0, 0.0]), torch.tensor([bad, -1.0])]
    before = None
    if good_steps:
        before = state_bits(parameters, optimizer)
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for state in optimizer.state.values():
            assert state["step"] == good_steps
        if before is None and good_steps == 0:  # the state was made by this step
            assert not any(bits.any() for bits in state_bits(parameters, optimizer)[2:])
        bits = state_bits(parameters, optimizer)
        assert before is None or all(map(torch.equal, bits, before))
        before = bits
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(parameter.grad.isnan(), gradient.isnan())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_skipped_step_leaves_what_the_good_steps_made(impl):
    good = [drawn(SHAPES, seed) for seed in (1, 2)]
    bad = drawn(SHAPES, 3)
    bad[0][0, 0] = math.nan
    parameters, optimizer = trained(impl, [good[0], bad, good[1]], **PUBLISHED)
    wanted, wanted_optimizer = trained(impl, good, **PUBLISHED)
    got_bits = state_bits(parameters, optimizer)
    wanted_bits = state_bits(wanted, wanted_optimizer)
    assert all(map(torch.equal, got_bits, wanted_bits))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_parameter_without_a_gradient_stays_and_does_not_age(impl):
    moved = nn.Parameter(torch.ones(3))
    resting = nn.Parameter(torch.ones(3))
    optimizer = Lamb([moved, resting], 0.1, impl=impl, **PUBLISHED)
    optimizer.step()  # none has one
    moved.grad = torch.ones(3)
    optimizer.step()
    assert (
        torch.equal(resting.detach(), torch.ones(3)) and resting not in optimizer.state
    )
    assert optimizer.state[moved]["step"] == 1
    # its first step, when it comes, is a first step
    moved.grad = torch.zeros(3)
    resting.grad = torch.ones(3)
    optimizer.step()
    alone = nn.Parameter(torch.ones(3))
    alone.grad = torch.ones(3)
    Lamb([alone], 0.1, impl=impl, **PUBLISHED).step()
    assert torch.allclose(resting.detach(), alone.detach())


@pytest.mark.parametrize("impl", IMPLS)
def test_groups_keep_their_settings_and_share_the_clipping(impl):
    weights = drawn([(6,), (4,)], 0)
    gradients = drawn([(6,), (4,)], 1)
    together = [nn.Parameter(weight.clone()) for weight in weights]
    groups = [
        {"params": together[:1], "weight_decay": 0.0, "betas": (0.5, 0.5)},
        {"params": together[1:], "lr": 0.2},
    ]
    optimizer = Lamb(groups, 0.01, impl=impl, clip=0.1, **PUBLISHED)
    norm = float(torch.cat(gradients).norm())
    alone = [nn.Parameter(weight.clone()) for weight in weights]
    settings = [
        {"lr": 0.01, "betas": (0.5, 0.5), "eps": 1e-9, "weight_decay": 0.0},
        {"lr": 0.2, **PUBLISHED},
    ]
    for i in range(2):
        together[i].grad = gradients[i]
        alone[i].grad = gradients[i] * (0.1 / norm)
        Lamb([alone[i]], impl="reference", **settings[i]).step()
    optimizer.step()
    for got, wanted in zip(together, alone, strict=True):
        assert torch.allclose(got.detach(), wanted.detach(), rtol=1e-5)


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setattr(numba_cpu, "SLICE", numba_cpu.BLOCK // 2)
    steps = [drawn(SHAPES, seed) for seed in (1, 2)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            parameters, optimizer = trained("numba_cpu", steps, **PUBLISHED)
            results.append(state_bits(parameters, optimizer))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gradient_with_turned_axes_counts_as_it_reads_and_is_left_alone(impl):
    turned = nn.Parameter(torch.ones(3, 4))
    plain = nn.Parameter(torch.ones(3, 4))
    gradient = drawn([(4, 3)], 0)[0]
    turned.grad = gradient.T
    plain.grad = gradient.T.contiguous()
    for parameter in (turned, plain):
        Lamb([parameter], 0.1, impl=impl, **PUBLISHED).step()
    assert torch.equal(turned.detach(), plain.detach())
    assert torch.equal(gradient, drawn([(4, 3)], 0)[0])


def test_what_watches_weights_sees_that_they_changed():
    # caches of packed weights ask for `_version`
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    before = parameter._version
    Lamb([parameter], 0.1, impl="numba_cpu", **PUBLISHED).step()
    assert parameter._version > before


@pytest.mark.parametrize("impl", ["reference", "foreach"])
def test_no_step_reads_a_value_on_the_host(impl):
    rate = torch.tensor(0.1)
    parameters = [nn.Parameter(weight) for weight in drawn(SHAPES, 0)]
    optimizer = Lamb(parameters, rate, impl=impl, **PUBLISHED)
    with Waits() as seen, Reads():
        for seed in (1, 2):
            for parameter, gradient in zip(
                parameters, drawn(SHAPES, seed), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()
    assert seen.names == []
    with Waits() as seen:
        bool(parameters[0].grad.sum() > 0)
    assert seen.names == ["_local_scalar_dense"]  # the test can fail


def test_fake_parameters_take_a_path_that_needs_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        layer = nn.Linear(4, 4)
        optimizer = Lamb(layer.parameters(), 0.1, **PUBLISHED)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert optimizer.impl == "foreach"


def test_auto_is_the_fastest_that_fits():
    single = nn.Parameter(torch.ones(4, 3))
    double = nn.Parameter(torch.ones(3).double())
    turned = nn.Parameter(torch.ones(4, 3).T)
    for parameter, impl in (
        (single, "numba_cpu"),
        (double, "foreach"),
        (turned, "foreach"),
    ):
        assert Lamb([parameter], 0.1, **PUBLISHED).impl == impl


def test_a_rate_that_is_filled_or_scheduled_is_followed():
    rate = torch.tensor(0.0)
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Lamb([parameter], rate, **PUBLISHED)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3))
    rate.fill_(0.1)
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((3,), 0.9))
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # as a loop of training does
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((3,), 0.45))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    optimizer.step()
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_run_goes_on_bit_for_bit_from_its_saved_state(impl, tmp_path):
    steps = [drawn(SHAPES, seed) for seed in range(1, 5)]
    unbroken, _ = trained(impl, steps, **PUBLISHED)
    parameters, optimizer = trained(impl, steps[:2], **PUBLISHED)
    optimizer.param_groups[0]["lr"] = 0.01
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    rate = torch.tensor(9.0)
    resumed = Lamb(parameters, rate, impl=impl, betas=(0.1, 0.1), weight_decay=9.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.param_groups[0]["lr"] is rate  # the caller's, and a graph's
    for gradients in steps[2:]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        resumed.step()
    assert all(map(torch.equal, parameters, unbroken))


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Lamb([parameter], 0.1, **PUBLISHED)

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure) == 2
    assert optimizer.state[parameter]["step"] == 1


ONE = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}


@pytest.mark.parametrize(("wrong", "said"), [
    ({"clip": 0}, "clip: expected above 0, math.inf for no limit, got 0."),
    ({"clip": -1.0}, "clip: expected above 0, math.inf for no limit, got -1.0."),
    ({"clip": math.nan}, "clip: expected above 0"),
    ({"betas": (0.9, 1)}, "betas: expected two numbers from 0 to below 1, got (0.9, 1)."),
    ({"betas": (1.0, 0.9)}, "betas: expected two"),
    ({"betas": 0.9}, "betas: expected two"),
    ({"lr": -0.1}, "lr: expected at least 0, and finite, got -0.1."),
    ({"lr": torch.ones(2)}, "lr: expected a number, or a tensor () on cpu, got shape (2,) on cpu."),
    ({"eps": -1e-9}, "eps: expected at least 0"),
    ({"weight_decay": math.inf}, "weight_decay: expected at least 0"),
    ({"ratio": "none"}, "ratio: expected one of 'decayed', 'all', got 'none'."),
    ({"impl": "triton"}, "impl: expected one of 'auto', 'reference', 'foreach', 'numba_cpu', got 'triton'."),
])  # fmt: skip
def test_a_wrong_setting_is_named(wrong, said):
    with pytest.raises(ValueError) as raised:
        Lamb([nn.Parameter(torch.ones(2))], **(ONE | wrong))
    assert said in str(raised.value)


@pytest.mark.parametrize(("parameters", "impl", "said"), [
    ([torch.ones(2).bfloat16()], "auto", "params: expected float32 or float64, got torch.bfloat16. Train in half precision by torch.autocast"),
    ([torch.ones(2), torch.ones(2).double()], "auto", "params: expected one dtype, got torch.float32, torch.float64."),
    ([torch.ones(2), torch.ones(2, device="meta")], "auto", "params: expected one device, got cpu, meta."),
    ([torch.ones(2).double()], "numba_cpu", "got one in torch.float64. Pass impl='auto'."),
    ([torch.ones(2, 3).T], "numba_cpu", "got one that is not contiguous."),
    ([torch.ones(2, device="meta")], "numba_cpu", "got one on meta."),
])  # fmt: skip
def test_parameters_that_do_not_fit_are_named(parameters, impl, said):
    with pytest.raises(ValueError) as raised:
        Lamb([nn.Parameter(parameter) for parameter in parameters], impl=impl, **ONE)
    assert said in str(raised.value)


def test_a_group_that_does_not_fit_is_not_added():
    optimizer = Lamb([nn.Parameter(torch.ones(2))], **ONE)
    with pytest.raises(ValueError, match="one dtype"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_and_states_of_other_shapes_are_refused_before_anything_is_written():
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = Lamb(embedding.parameters(), **ONE)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match="params: expected dense gradients, got a sparse one."
    ):
        optimizer.step()
    assert torch.equal(embedding.weight.detach(), before)
    embedding.weight.grad = torch.ones(3, 2)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = saved["state"][0] | {"exp_avg": torch.zeros(3)}
    with pytest.raises(
        ValueError, match="exp_avg of shape \\(3, 2\\) for parameter 0, got \\(3,\\)"
    ):
        optimizer.load_state_dict(saved)
    assert optimizer.state[embedding.weight]["exp_avg"].shape == (3, 2)
