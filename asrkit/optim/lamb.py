"""The LAMB optimizer: its arguments, its state, and which implementation runs."""

import math
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from asrkit.optim.norms import local
from asrkit.optim.queued import (
    QueuedOptimizer,
    check_settings,
    local_gradient,
    norms_of,
    present,
    rate_of,
    taking_part,
)
from asrkit.optim.step import Group, Settings, Tensors, lamb_step
from asrkit.runtime import JIT_OFF
from asrkit.shapes import expect, is_finite

Ratio = Literal["decayed", "all"]
Impl = Literal["auto", "reference", "foreach", "numba_cpu"]
RATIOS = ("decayed", "all")
IMPLS = ("auto", "reference", "foreach", "numba_cpu")


class Lamb(QueuedOptimizer):
    """LAMB: Adam, with the update of each parameter as long as `lr` times the parameter itself.

    The formula stands in `asrkit.optim.step`. Clipping by the norm over all parameters is a part of
    it: do not clip before. A step whose gradient is not finite, or has a norm above 1e19 in
    float32, changes nothing, and no host waits to learn it. Learning rate and steps are tensors, so
    that a CUDA graph of a step follows them. Parameters may be DTensors, as those of FSDP2: with
    one that has a gradient on some ranks only, the others count as zero.

    Source: You et al., arXiv 1904.00962; NVIDIA's apex, whose formula this is. Settings of MLPerf's
    RNN-T: betas (0.9, 0.9985), eps 1e-9, weight_decay 1e-3, clip 1.

    Args:
        params: parameters, or dicts of parameter groups, as of torch.optim. All float32 or all
            float64, on one device.
        lr: learning rate, at least 0; a tensor () on the parameters' device stays the caller's, who
            may fill it between steps.
        betas: decay of the moving averages of gradients and of their squares, from 0 to below 1.
        eps: added to the root of the second average, at least 0.
        weight_decay: share of the weights that is added to the update, at least 0.
        clip: largest norm of the gradient of all parameters; above 0, math.inf for no limit.
        ratio: which updates are scaled by ||p|| / ||u||: those of groups with weight decay
            ("decayed", as published), or all.
        bias_correction: whether the averages are divided by 1 - beta^t.
        impl: "numba_cpu" (float32, contiguous, CPU), "foreach", "reference", or "auto": the first
            of these that fits.

    Attributes:
        gradient_norm: norm of all gradients in the last step, before clipping, (); None before it.

    Raises:
        ValueError: an argument out of range; parameters of several dtypes or devices, or DTensors
            beside others.
    """

    def __init__(  # noqa: PLR0913 settings of a published optimizer
        self,
        params: Any,
        lr: float | Tensor,
        *,
        betas: tuple[float, float],
        eps: float = 1e-6,
        weight_decay: float,
        clip: float = 1.0,
        ratio: Ratio = "decayed",
        bias_correction: bool = True,
        impl: Impl = "auto",
    ) -> None:
        clips = clip == math.inf or (is_finite(clip) and clip > 0)
        expect(clips, "clip", "above 0, math.inf for no limit", clip)
        expect(impl in IMPLS, "impl", f"one of {', '.join(map(repr, IMPLS))}", repr(impl))
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ratio": ratio,
            "bias_correction": bias_correction,
            "capturable": True,  # torch keeps the steps on the device then
        }
        self.clip = clip
        self.gradient_norm: Tensor | None = None
        super().__init__(params, defaults)
        self.impl = resolve(self._all_parameters(), impl)

    def _update(self) -> None:
        groups = [group for group in map(self._group, self.param_groups) if group.steps]
        if groups:
            self.gradient_norm = lamb_step(groups, clip=self.clip, kernels=self._kernels())

    def _kernels(self) -> Any:
        return import_module(f"asrkit.optim.{self.impl}")

    def _check_group(self, group: dict[str, Any]) -> None:
        check_settings(group)
        ratio = group["ratio"]
        expect(ratio in RATIOS, "ratio", f"one of {', '.join(map(repr, RATIOS))}", repr(ratio))

    def _group(self, group: dict[str, Any]) -> Group:
        """What this rank holds of a parameter group in this step."""
        parameters = taking_part(group)
        states = [self._state(parameter) for parameter in parameters]
        norms = norms_of(parameters)
        return Group(
            tensors=Tensors(
                weights=[local(parameter) for parameter in parameters],
                gradients=[local_gradient(parameter) for parameter in parameters],
                exp_avgs=[local(state["exp_avg"]) for state in states],
                exp_avg_sqs=[local(state["exp_avg_sq"]) for state in states],
            ),
            settings=settings_of(group),
            norms=norms,
            steps=[state["step"] for state in states],
            present=present(parameters, norms, group["lr"].device),
        )

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, made where there is none yet."""
        state = self.state[parameter]
        if not state:
            like = partial(torch.zeros_like, memory_format=torch.preserve_format)
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = like(parameter.detach())
            state["exp_avg_sq"] = like(parameter.detach())
        return state

    def _state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        shape = tuple(parameter.shape)
        return {"exp_avg": shape, "exp_avg_sq": shape}


def resolve(parameters: Iterable[Tensor], impl: Impl) -> str:
    """The implementation that runs: `impl`, or for "auto" the fastest that fits.

    Args:
        parameters: all parameters.
        impl: as of `Lamb`.

    Raises:
        ValueError: `impl` is "numba_cpu", and a parameter does not fit it.
    """
    reasons = [_unfit(parameter) for parameter in parameters]
    unfit = next(filter(None, reasons), "")
    if impl == "auto":
        if unfit or JIT_OFF:
            return "foreach"
        return "numba_cpu"
    wanted = "contiguous float32 parameters on the CPU for impl='numba_cpu'"
    expect(impl != "numba_cpu" or not unfit, "params", wanted, unfit, "Pass impl='auto'.")
    return impl


def _unfit(parameter: Tensor) -> str:
    """Why "numba_cpu" cannot update `parameter`; "" where it can."""
    with torch.no_grad():
        tensor = local(parameter)
    if tensor.device.type != "cpu":
        return f"one on {tensor.device}"
    if type(tensor) not in (Tensor, torch.nn.Parameter):  # such as a fake tensor, without memory
        return f"a {type(tensor).__name__}"
    if tensor.dtype != torch.float32:
        return f"one in {tensor.dtype}"
    if not tensor.is_contiguous():
        return "one that is not contiguous"
    return ""


def settings_of(group: dict[str, Any]) -> Settings:
    """The settings of a parameter group of torch.optim.

    Args:
        group: with the keys of `Lamb`'s arguments.
    """
    return Settings(
        rate=rate_of(group),
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        ratio=group["ratio"] == "all" or group["weight_decay"] != 0,
        bias_correction=group["bias_correction"],
    )
