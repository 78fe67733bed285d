"""LAMB and NovoGrad against their formulas in float64, with bad gradients and after a restart."""

import math
from pathlib import Path

import pytest
import torch
from torch import multiprocessing, nn

from asrkit.optim import Lamb, NovoGrad
from asrkit.workbench.measure import host_reads

SHAPES = [(33, 17), (5,), (), (2, 3, 4), (0,), (4095,)]
MLPERF = {"betas": (0.9, 0.9985), "eps": 1e-9, "weight_decay": 1e-3}
KINDS = [(Lamb, MLPERF), (NovoGrad, {"betas": (0.95, 0.9)})]
both_kinds = pytest.mark.parametrize(("kind", "settings"), KINDS)


def drawn(seed, shapes=SHAPES, dtype=torch.float32):
    """Random tensors with values of float32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def take_steps(optimizer, parameters, steps_of_gradients):
    """One step with each list of gradients."""
    for gradients in steps_of_gradients:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        optimizer.step()


def trained(kind, steps_of_gradients, lr=0.01, dtype=torch.float32, **settings):
    """The parameters and the optimizer after all steps."""
    parameters = [nn.Parameter(weight) for weight in drawn(0, dtype=dtype)]
    optimizer = kind(parameters, lr, **settings)
    take_steps(optimizer, parameters, steps_of_gradients)
    return parameters, optimizer


def errors(parameters, wanted):
    """Relative error of each parameter; 0 for an empty one."""
    pairs = zip(parameters, wanted, strict=True)
    return [
        float((p.detach().double() - w).norm() / (w.norm() + 1e-300)) for p, w in pairs
    ]


def lamb_by_formula(
    steps_of_gradients, lr, *, betas, eps, weight_decay, clip=1.0, dtype=torch.float64
):
    """The weights after all steps of LAMB, tensor after tensor."""
    weights = drawn(0, dtype=dtype)
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    for step, gradients in enumerate(steps_of_gradients, 1):
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
        divisor = max(1.0, norm / clip)
        for weight, g, m, v in zip(weights, gradients, first, second, strict=True):
            g = g.to(dtype) / divisor
            m += (1 - betas[0]) * (g - m)
            v += (1 - betas[1]) * (g**2 - v)
            mean = m / (1 - betas[0] ** step)
            square = v / (1 - betas[1] ** step)
            update = mean / (square**0.5 + eps) + weight_decay * weight
            scale = 1.0
            if weight_decay > 0 and weight.norm() > 0 and update.norm() > 0:
                scale = float(weight.norm() / update.norm())
            weight -= lr * scale * update
    return weights


def novograd_by_formula(
    steps_of_gradients, lr, *, betas=(0.95, 0.0), eps=1e-8, weight_decay=1e-3, dtype=torch.float64
):  # fmt: skip
    """The weights after all steps of NovoGrad, with v as a Python number for each tensor."""
    weights = drawn(0, dtype=dtype)
    momenta = [torch.zeros_like(weight) for weight in weights]
    second = [None] * len(weights)
    for gradients in steps_of_gradients:
        for i, gradient in enumerate(gradients):
            square = float((gradient.double() ** 2).sum())
            if second[i] is not None:
                square = betas[1] * second[i] + (1 - betas[1]) * square
            second[i] = square
            divided = gradient.to(dtype) / (math.sqrt(square) + eps)
            added = divided + weight_decay * weights[i]
            momenta[i] = betas[0] * momenta[i] + added
            weights[i] -= lr * momenta[i]
    return weights


@pytest.mark.parametrize("options", [
    {},
    {"clip": 1e4},
    {"clip": math.inf},
    {"weight_decay": 0.0},
    {"betas": (0.0, 0.5)},
    {"eps": 0.3},
], ids=str)  # fmt: skip
def test_four_steps_of_lamb_follow_the_formula(options):
    check(Lamb, lamb_by_formula, 4, MLPERF | options)


@pytest.mark.parametrize("options", [
    {},
    {"weight_decay": 0.0},
    {"betas": (0.9, 0.25)},
    {"betas": (0.0, 0.98)},
    {"eps": 0.3},
    {"eps": 0.0},
], ids=str)  # fmt: skip
def test_fifty_steps_of_novograd_follow_the_formula(options):
    check(NovoGrad, novograd_by_formula, 50, options)


def check(kind, formula, steps, settings):
    """An optimizer equals its formula in float64, and is about as close to it in float32 as the formula."""
    gradients = [drawn(seed) for seed in range(1, steps + 1)]
    exact = formula(gradients, 0.01, **settings)
    in_float64, _ = trained(kind, gradients, dtype=torch.float64, **settings)
    assert max(errors(in_float64, exact)) < 1e-12
    plain = formula(gradients, 0.01, dtype=torch.float32, **settings)
    parameters, _ = trained(kind, gradients, **settings)
    allowed = errors(plain, exact)
    for got, most in zip(errors(parameters, exact), allowed, strict=True):
        assert got <= 2 * most + 3e-7


def test_the_ratio_is_1_where_a_norm_is_0():
    zero = nn.Parameter(torch.zeros(3))
    still = nn.Parameter(torch.zeros(3))
    optimizer = Lamb([zero, still], 0.5, betas=(0.9, 0.9), weight_decay=0.1, eps=1e-9)
    half = torch.tensor([0.5, -0.5, 0.5])
    take_steps(optimizer, [zero, still], [[half, torch.zeros(3)]])
    assert torch.allclose(zero.detach(), -half)  # Adam's first step: lr
    assert not still.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 1e-9])
def test_with_gradients_of_zeros_lamb_moves_by_decay(eps, dtype):
    start = torch.tensor([1.0, -2.0], dtype=dtype)
    for weight_decay, factor in ((0.0, 1.0), (0.01, 0.9)):  # lr 0.1 of the norm
        parameter = nn.Parameter(start.clone())
        optimizer = Lamb([parameter], 0.1, betas=(0.5, 0.5), eps=eps, weight_decay=weight_decay)  # fmt: skip
        take_steps(optimizer, [parameter], [[torch.zeros(2)]] * 2)
        assert torch.allclose(parameter.detach(), factor**2 * start)
        take_steps(
            optimizer, [parameter], [[torch.tensor([0.0, 1.0])]]
        )  # a zero among others
        assert parameter.isfinite().all()
        assert parameter[1].abs() > abs(factor**2 * start[1])


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("beta2", [0.0, 0.5])
def test_with_gradients_of_zeros_novograd_moves_by_momentum_and_decay(eps, beta2):
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = NovoGrad([parameter], 0.1, betas=(0.5, beta2), eps=eps, weight_decay=0.01)  # fmt: skip
    take_steps(optimizer, [parameter], [[torch.zeros(2)]] * 2)
    first = 1 - 0.1 * 0.01
    second = first - 0.1 * (0.5 * 0.01 + 0.01 * first)
    assert torch.allclose(parameter.detach(), second * torch.tensor([1.0, -2.0]))


def everything(parameters, optimizer):
    """Copies of weights and state."""
    tensors = [parameter.detach() for parameter in parameters]
    for parameter in parameters:
        tensors += optimizer.state[parameter].values()
    return [tensor.clone() for tensor in tensors]


@both_kinds
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38])  # 3e38 overflows
def test_a_step_that_is_not_finite_changes_nothing_and_later_steps_neither(
    kind, settings, bad
):
    good = [drawn(seed) for seed in (1, 2)]
    gradients = drawn(3)
    gradients[0][0, 0] = bad
    parameters, optimizer = trained(kind, [gradients, good[0]], **settings)
    before = everything(parameters, optimizer)
    take_steps(optimizer, parameters, [gradients, gradients])
    assert all(map(torch.equal, everything(parameters, optimizer), before))
    take_steps(optimizer, parameters, good[1:])
    wanted = everything(*trained(kind, good, **settings))
    assert all(map(torch.equal, everything(parameters, optimizer), wanted))


@both_kinds
def test_a_parameter_without_a_gradient_keeps_its_value_and_state(kind, settings):
    moved, resting, alone = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = kind([moved, resting], 0.1, **settings)
    optimizer.step()  # no parameter has a gradient
    take_steps(optimizer, [moved], [[torch.ones(3)]])
    assert torch.equal(resting.detach(), torch.ones(3))
    assert resting not in optimizer.state and optimizer.state[moved]["step"] == 1
    # its first step later is a first step
    take_steps(optimizer, [moved, resting], [[torch.zeros(3), torch.ones(3)]])
    take_steps(kind([alone], 0.1, **settings), [alone], [[torch.ones(3)]])
    assert torch.allclose(resting.detach(), alone.detach())


@pytest.mark.parametrize(("kind", "settings"), [
    (Lamb, MLPERF | {"clip": 0.1}), (NovoGrad, {}),
])  # fmt: skip
def test_groups_keep_their_settings_and_share_the_clipping(kind, settings):
    changes = [{"weight_decay": 0.0, "betas": (0.5, 0.5)}, {"lr": 0.2, "eps": 0.1}]
    shapes = [(6,), (4,)]
    gradients = drawn(1, shapes)
    factor = settings.get("clip", 1)
    if kind is Lamb:
        factor /= float(torch.cat(gradients).norm())
    together, alone = (list(map(nn.Parameter, drawn(0, shapes))) for _ in range(2))
    groups = []
    for i, change in enumerate(changes):
        groups.append({"params": together[i]} | change)
        single = kind([alone[i]], **{"lr": 0.01} | settings | change)
        take_steps(single, [alone[i]], [[factor * gradients[i]]])
    take_steps(kind(groups, 0.01, **settings), together, [gradients])
    torch.testing.assert_close(together, alone)


@both_kinds
def test_a_transposed_gradient_is_read_by_its_indices(kind, settings):
    turned = nn.Parameter(torch.ones(3, 4))
    plain = nn.Parameter(torch.ones(3, 4))
    gradient = drawn(0, [(4, 3)])[0]
    turned.grad = gradient.T
    plain.grad = gradient.T.contiguous()
    for parameter in (turned, plain):
        kind([parameter], 0.1, **settings).step()
    assert torch.equal(turned.detach(), plain.detach())


@both_kinds
def test_no_step_reads_a_value_on_the_host(kind, settings):
    parameters = [nn.Parameter(weight.to("meta")) for weight in drawn(0)]
    rate = torch.tensor(0.1, device="meta")
    optimizer = kind(parameters, rate, **settings)
    gradients = [[weight.to("meta") for weight in drawn(1)]] * 2

    def steps():
        take_steps(optimizer, parameters, gradients)

    assert host_reads(steps, device="meta") == {}


@both_kinds
def test_a_rate_in_a_tensor_works_like_a_number(kind, settings):
    rate = torch.tensor(0.0)
    by_tensor, by_number = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = kind([by_tensor], rate, **settings)
    other = kind([by_number], 0.0, **settings)
    ones = [[torch.ones(3)]]
    for lr in (0.0, 0.1, 0.5):
        rate.fill_(lr)
        take_steps(optimizer, [by_tensor], ones)
        other.param_groups[0]["lr"] = lr  # as a training loop does
        take_steps(other, [by_number], ones)
    assert torch.equal(by_tensor, by_number) and by_tensor[0] < 1


@both_kinds
def test_a_run_resumes_bit_for_bit_from_its_saved_state(kind, settings, tmp_path):
    steps = [drawn(seed) for seed in range(1, 5)]
    unbroken, _ = trained(kind, steps, **settings)
    parameters, optimizer = trained(kind, steps[:2], **settings)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed = kind(parameters, 9.0, betas=(0.1, 0.1), weight_decay=9.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    take_steps(resumed, parameters, steps[2:])
    assert all(map(torch.equal, parameters, unbroken))


@pytest.mark.parametrize(("wrong", "message"), [
    ({"clip": 0}, "clip: expected above 0, math.inf for no limit, got 0."),
    ({"betas": (0.9, 1)}, "betas: expected two numbers from 0 to below 1, got (0.9, 1)."),
    ({"lr": -0.1}, "lr: expected at least 0, and finite, got -0.1."),
    ({"lr": torch.ones(2)}, "lr: expected a number, or a tensor (), got shape (2,)."),
    ({"weight_decay": math.inf}, "weight_decay: expected at least 0"),
    ({"params": [nn.Parameter(torch.ones(2).bfloat16())]},
     "params: expected float32 or float64, got torch.bfloat16. Train in half precision by torch.autocast"),
])  # fmt: skip
def test_an_invalid_setting_is_named(wrong, message):
    right = {"params": [nn.Parameter(torch.ones(2))], "lr": 0.1, **MLPERF}
    with pytest.raises(ValueError) as raised:
        Lamb(**(right | wrong))
    assert message in str(raised.value)


SHARED = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.01, "clip": math.inf}


def shared_steps(make):
    """The weights after three steps with the same gradients on every process."""
    shapes = [(5, 3), (7,), (2, 2)]
    parameters = [nn.Parameter(weight.double()) for weight in drawn(0, shapes)]
    optimizer = make(parameters)
    take_steps(optimizer, parameters, [drawn(seed, shapes) for seed in (1, 2, 3)])
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def rank_of_two(rank, folder):
    # warns as it is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)  # fmt: skip
    kept = []

    def make(parameters):
        kept.append(ZeroRedundancyOptimizer(parameters, Lamb, **SHARED))
        return kept[0]

    torch.save(shared_steps(make), Path(folder) / f"{rank}.pt")
    held = 0
    for state in kept[0].optim.state.values():
        held += sum(value.numel() for value in state.values())
    assert held < 2 * 26 + 3  # two moments of 26 weights, and counts: not all of them
    torch.distributed.destroy_process_group()


@pytest.mark.live
def test_zero_redundancy_takes_the_steps_of_one_process_with_less_state(tmp_path):
    alone = shared_steps(lambda parameters: Lamb(parameters, **SHARED))
    multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        shared = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(shared, alone, rtol=1e-12, atol=0)
