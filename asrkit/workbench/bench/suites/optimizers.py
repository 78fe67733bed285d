"""The suite of optimizers: one step over the parameters of MLPerf's RNN-T, and one update of their
average.

All arms of a step share parameters and gradients, at a learning rate of 0; each has a state of its
own. Those of LAMB are compared at a small size, after three steps. On a GPU they are not timed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from asrkit.models import (
    LSTMConfig,
    LSTMEncoderConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.optim import Average, Lamb
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.ceilings import ceilings

PUBLISHED: dict[str, Any] = {"betas": (0.9, 0.9985), "eps": 1e-9, "weight_decay": 1e-3}
DECAY = 0.995
# Bytes that a step moves at least for each float32 weight.
ADAM_B = 28  # reads gradient, both moments and weight; writes all but the gradient
LAMB_B = 44  # reads the gradient for its norm first, and moments and weight again for the ratio
AVERAGE_B = 12  # reads weight and average, writes the average


def mlperf_config(quick: bool) -> TransducerConfig:
    """MLPerf's RNN-T, or the same with a hundredth of the width."""
    config = presets.mlperf_rnnt()
    if not quick:
        return config
    return replace(
        config,
        encoder=LSTMEncoderConfig(width=16),
        predictor=LSTMConfig(width=16, layers=2),
        joint_width=16,
    )


def weights(quick: bool, device: str) -> list[nn.Parameter]:
    """Random parameters with random gradients, of the model's shapes.

    Args:
        quick: of a small model.
        device: of the parameters.
    """
    with torch.device("meta"):
        shapes = [weight.shape for weight in TransducerModel(mlperf_config(quick)).parameters()]
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter((torch.randn(shape, generator=generator) / 50).to(device))
        parameter.grad = torch.randn(shape, generator=generator).to(device) / 100
        parameters.append(parameter)
    return parameters


def suite(device: str, quick: bool) -> Iterator[Case]:
    """A step of each optimizer, and an update of the average.

    Args:
        device: "cpu" or "cuda".
        quick: a small model.
    """
    yield step_case(device, quick)
    yield average_case(device, quick)


def implementations(device: str) -> list[str]:
    """The implementations of LAMB that run on `device`, the reference first."""
    names = ["reference", "foreach"]
    if device == "cpu":
        names.append("numba_cpu")
    return names


def step_case(device: str, quick: bool) -> Case:
    """One step of LAMB and of torch's optimizers.

    Args:
        device: "cpu" or "cuda".
        quick: a small model, and the machine's ceiling at smaller sizes.
    """
    parameters = weights(quick, device)
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    arms: dict[str, Callable[[], Any]] = {}
    compared: dict[str, Callable[[], Any]] = {}
    for impl in implementations(device):
        name = f"lamb_{impl}"
        arms[name] = _step(lamb(parameters, 0.0, impl))
        compared[name] = partial(trained, impl, device)
    ours = [*arms]
    for name in ("fused", "foreach"):
        options: dict[str, Any] = {name: True}
        arms[f"adamw_{name}"] = _step(torch.optim.AdamW(parameters, lr=0.0, **options))
    arms["adafactor"] = _step(torch.optim.Adafactor(parameters, lr=0.0))
    arms["muon_of_matrices"] = _step(torch.optim.Muon(matrices, lr=0.0))
    floors = dict.fromkeys(ours, LAMB_B) | {"adamw_fused": ADAM_B, "adamw_foreach": ADAM_B}
    ratios = [(name, "adamw_fused") for name in [*ours, "adafactor", "muon_of_matrices"]]
    ratios += [("lamb_reference", name) for name in ours[1:]]
    count = sum(parameter.numel() for parameter in parameters)
    return Case(
        what="optimizer-step",
        arms=arms,
        compared_arms=compared,
        params={"shape": [count], "tensors": len(parameters)},
        arm_params=_floors(floors, count, device, quick),
        ratios=ratios,
        tolerance=1e-5,
        memory=True,
        warmup=1,
    )


def lamb(parameters: list[nn.Parameter], rate: float, impl: Any) -> Lamb:
    """LAMB with the settings of MLPerf's RNN-T.

    Args:
        parameters: with gradients.
        rate: learning rate.
        impl: of `Lamb`.
    """
    return Lamb(parameters, rate, impl=impl, **PUBLISHED)


def _step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    return optimizer.step


def trained(impl: str, device: str) -> tuple[Tensor, ...]:
    """The weights of a small model after three steps of LAMB.

    Args:
        impl: of `Lamb`.
        device: "cpu" or "cuda".
    """
    parameters = weights(True, device)
    optimizer = lamb(parameters, 0.01, impl)
    for _ in range(3):
        optimizer.step()
    return tuple(parameter.detach() for parameter in parameters)


def average_case(device: str, quick: bool) -> Case:
    """One update of an exponential moving average: torch's module, a formula, and ours.

    Args:
        device: "cpu" or "cuda".
        quick: a small model, and the machine's ceiling at smaller sizes.
    """
    model = nn.ParameterList(weights(quick, device))
    count = sum(parameter.numel() for parameter in model.parameters())
    arms = averages(model)
    small = [nn.ParameterList(weights(True, device)) for _ in arms]
    compared = {name: partial(_averaged, name, one) for name, one in zip(arms, small, strict=True)}
    return Case(
        what="weight-average",
        arms=arms,
        compared_arms=compared,
        params={"shape": [count], "tensors": len(model)},
        arm_params=_floors(dict.fromkeys(arms, AVERAGE_B), count, device, quick),
        ratios=[("formula", "average"), ("torch_averaged_model", "average")],
        memory=True,
        warmup=1,
    )


def averages(model: nn.ParameterList) -> dict[str, Callable[[], Any]]:
    """Ways to update an average of `model`; what each call returns is the average."""
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    theirs.update_parameters(model)  # the first one copies
    ours = Average(model, DECAY, warm_up=False)
    plain = [parameter.detach().clone() for parameter in model]

    def formula() -> list[Tensor]:
        for mean, parameter in zip(plain, model, strict=True):
            mean.copy_(DECAY * mean + (1 - DECAY) * parameter.detach())
        return plain

    def torch_averaged_model() -> list[Tensor]:
        theirs.update_parameters(model)
        return list(theirs.module.parameters())

    def average() -> list[Tensor]:
        ours.update()
        return list(ours.values.values())

    return {
        "formula": formula,
        "torch_averaged_model": torch_averaged_model,
        "average": average,
    }


def _averaged(name: str, model: nn.ParameterList) -> list[Tensor]:
    """The average after three updates of weights that change."""
    update = averages(model)[name]
    for _ in range(3):
        with torch.no_grad():
            for parameter in model:
                parameter.mul_(1.5)
        mean = update()
    return [value.detach() for value in mean]


def _floors(
    bytes_of_weight: Mapping[str, int], count: int, device: str, quick: bool
) -> dict[str, dict[str, Any]]:
    """The least bytes of each arm, beside what the machine can move in a second."""
    top = ceilings(device, quick).bytes_per_s
    return {
        name: {"floor_B": each * count, "peak_B": top} for name, each in bytes_of_weight.items()
    }


SUITE = Suite(name="optimizers", cases=suite)
