"""LAMB and averaged weights against their formulas in float64, on the CPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from asrkit.optim import Average, Lamb
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.suites import optimizers


def optimizer_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the implementations of LAMB, and of averages."""
    for impl in optimizers.implementations(device.partition(":")[0]):
        arms = rf"^optimizer-step in float32: lamb_{impl}$"
        yield Check("models", f"lamb {impl}", arms, partial(_lamb, device, impl))
    arms = "^weight-average in float32: average$"
    yield Check("models", "weight average", arms, partial(_average, device))


def _lamb(device: str, impl: Any) -> None:
    """Four steps, of which the second has a gradient that is not finite and changes nothing."""
    ours = optimizers.weights(optimizers.SMALL, device)
    exact = []
    for parameter in ours:
        twin = nn.Parameter(parameter.detach().cpu().double())
        twin.grad = _gradient(parameter).cpu().double()
        exact.append(twin)
    optimizer = Lamb(ours, 0.01, impl=impl, **optimizers.PUBLISHED)
    reference = Lamb(exact, 0.01, impl="reference", **optimizers.PUBLISHED)
    for step in range(4):
        poisoned = step == 1
        if not poisoned:
            reference.step()
            optimizer.step()
            continue
        kept = _gradient(ours[0])[0, 0].clone()
        _gradient(ours[0])[0, 0] = torch.inf
        optimizer.step()
        _gradient(ours[0])[0, 0] = kept
    near(ours, exact, 1e-5)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _average(device: str) -> None:
    weight = torch.zeros(1000, device=device)
    average = Average([weight], 0.9, warm_up=False)
    wanted = torch.zeros(1000, dtype=torch.float64)
    for value in range(5):
        weight.fill_(value)
        average.update()
        wanted = 0.9 * wanted + 0.1 * value
    with average.swapped():
        near([weight], [wanted], 1e-6)
    near([weight], [torch.full_like(wanted, 4)], 0)
