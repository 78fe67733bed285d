"""NovoGrad: each tensor's gradient is divided by its norm, and momentum does the rest.

    v <- ||g||^2                                     of each tensor, at its first step
    v <- beta2 v + (1 - beta2) ||g||^2               from then on
    m <- beta1 m + share (g / (sqrt(v) + eps) + weight_decay p)
    p <- p - rate m

`share` is 1, or with `average` 1 - beta1. With beta2 = 0, as Jasper was trained, each gradient has
norm 1, so the scale of a loss does not matter, nor does clipping. The weight decay is a part of the
momentum, and nothing is corrected for its bias. Source: B. Ginsburg et al., arXiv 1905.11286,
algorithm 1, as NVIDIA's training of Jasper computes it.

The norm is a number of the whole tensor, so its average takes no memory to speak of: the state is
half of Adam's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from asrkit.optim import foreach, reference
from asrkit.optim.norms import Norms, local
from asrkit.optim.queued import (
    QueuedOptimizer,
    check_settings,
    local_gradient,
    norms_of,
    present,
    rate_of,
    taking_part,
)
from asrkit.optim.step import count_steps
from asrkit.shapes import expect

Impl = Literal["foreach", "reference"]
IMPLS = ("foreach", "reference")


class NovoGrad(QueuedOptimizer):
    """NovoGrad: momentum of gradients that are divided by their norm, tensor by tensor.

    The formula stands in `asrkit.optim.novograd`. It needs no clipping. A step whose gradient is
    not finite, or has a norm above 1e19 in float32, changes nothing, and no host waits to learn it.
    Learning rate and steps are tensors, so that a CUDA graph of a step follows them. Parameters may
    be DTensors, as those of FSDP2: norms are those of whole parameters, and with one that has a
    gradient on some ranks only, the others count as zero.

    Source: B. Ginsburg et al., arXiv 1905.11286. The defaults are those of Jasper's training.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([600.0, 800.0])
    >>> NovoGrad([weight], 0.5, weight_decay=0.0).step()
    >>> weight.detach()
    tensor([2.7000, 3.6000])

    Args:
        params: parameters, or dicts of parameter groups, as of torch.optim. All float32 or all
            float64, on one device.
        lr: learning rate, at least 0; a tensor () on the parameters' device stays the caller's, who
            may fill it between steps.
        betas: decay of the momentum and of the squared norms, from 0 to below 1.
        eps: added to the norm, at least 0. A gradient of zeros stays zeros with 0 too.
        weight_decay: share of the weights that is added to the gradient, at least 0.
        average: whether the momentum is an average, with 1 - beta1 times what is added to it.
        impl: "foreach", torch's calls on lists of tensors, or "reference", the formula as it is
            written.

    Raises:
        ValueError: an argument out of range; parameters of several dtypes or devices, or DTensors
            beside others.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.95, 0.0),
        eps: float = 1e-8,
        weight_decay: float = 1e-3,
        average: bool = False,
        impl: Impl = "foreach",
    ) -> None:
        expect(impl in IMPLS, "impl", f"one of {', '.join(map(repr, IMPLS))}", repr(impl))
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "average": average,
            "capturable": True,  # torch keeps the steps on the device then
        }
        super().__init__(params, defaults)
        self.impl = impl

    def _update(self) -> None:
        groups = [group for group in map(self._group, self.param_groups) if group.steps]
        if groups:
            novograd_step(groups, impl=self.impl)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_settings(group)
        average = group["average"]
        expect(isinstance(average, bool), "average", "True or False", repr(average))

    def _group(self, group: dict[str, Any]) -> "Group":
        """What this rank holds of a parameter group in this step."""
        parameters = taking_part(group)
        states = [self._state(parameter) for parameter in parameters]
        norms = norms_of(parameters)
        rate = rate_of(group)
        beta1, beta2 = group["betas"]
        share = 1.0
        if group["average"]:
            share = 1 - beta1
        return Group(
            weights=[local(parameter) for parameter in parameters],
            gradients=[local_gradient(parameter) for parameter in parameters],
            momenta=[local(state["exp_avg"]) for state in states],
            squares=[state["exp_avg_sq"] for state in states],
            steps=[state["step"] for state in states],
            norms=norms,
            present=present(parameters, norms, rate.device),
            rate=rate,
            betas=(beta1, beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            share=share,
        )

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, made where there is none yet."""
        state = self.state[parameter]
        if not state:
            number = partial(torch.zeros, (), device=parameter.device)
            state["step"] = number(dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(
                parameter.detach(), memory_format=torch.preserve_format
            )
            state["exp_avg_sq"] = number(dtype=parameter.dtype)
        return state

    def _state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        return {"exp_avg": tuple(parameter.shape), "exp_avg_sq": ()}


@dataclass(frozen=True, kw_only=True)
class Group:
    """The P parameters of a parameter group, and what a rank holds of each.

    Attributes:
        weights: P tensors, updated in place.
        gradients: P tensors of the same shapes, which stay as they are.
        momenta: m of each, of the same shapes; updated in place.
        squares: v of each whole parameter, P tensors (); updated in place.
        steps: P tensors (), the updates that each parameter has had; counted on in place.
        norms: from what a rank holds to whole parameters.
        present: (P,) bool, whether a parameter has a gradient on any rank.
        rate: learning rate, ().
        betas: decay of m and of v.
        eps: added to the norm.
        weight_decay: share of the weights that is added to the gradient.
        share: factor of what is added to m.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    momenta: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    norms: Norms
    present: Tensor
    rate: Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    share: float


def novograd_step(groups: Sequence[Group], *, impl: Impl) -> None:
    """Update the weights and the state of all groups, unless a gradient is not finite.

    Args:
        groups: at least one, all on one device.
        impl: as of `NovoGrad`.
    """
    kernels = {"foreach": foreach, "reference": reference}[impl]
    move = {"foreach": _move_lists, "reference": _move_one_by_one}[impl]
    squares = []
    for group in groups:
        mine = kernels.squared_norms(group.gradients)
        squares.append(group.norms.total(mine[None])[0])
    finite = torch.cat(squares).sum().isfinite()
    for group, squares_of_group in zip(groups, squares, strict=True):
        applies = group.present & finite
        divisors = _update_norms(group, squares_of_group, applies)
        move(group, divisors, applies)
        count_steps(group.steps, applies)


def _update_norms(group: Group, squares: Tensor, applies: Tensor) -> Tensor:
    """Update v where a step applies; what divides each gradient, (P,), above 0.

    Args:
        group: whose `squares` are updated.
        squares: ||g||^2 of each parameter, (P,).
        applies: (P,) bool.
    """
    _, beta2 = group.betas
    before = torch.stack(group.squares)
    is_first = torch.stack(group.steps) == 0
    averaged = beta2 * before + (1 - beta2) * squares
    updated = torch.where(is_first, squares, averaged)
    updated = torch.where(applies, updated, before)
    torch._foreach_copy_(group.squares, list(updated.unbind()))
    divisors = updated.sqrt() + group.eps
    return torch.where(divisors > 0, divisors, 1)  # eps=0, and no gradient so far


def _move_one_by_one(group: Group, divisors: Tensor, applies: Tensor) -> None:
    """Update momenta and weights, tensor after tensor: what `_move_lists` is held to.

    Args:
        group: of the parameters.
        divisors: of the gradients, (P,).
        applies: (P,) bool.
    """
    beta1, _ = group.betas
    for i, weight in enumerate(group.weights):
        direction = group.gradients[i] / divisors[i] + group.weight_decay * weight
        momentum = beta1 * group.momenta[i] + group.share * direction
        reference.replace(group.momenta[i], momentum, applies[i])
        reference.replace(weight, weight - group.rate * momentum, applies[i])


def _move_lists(group: Group, divisors: Tensor, applies: Tensor) -> None:
    """Update momenta and weights by torch's calls on lists; see `asrkit.optim.foreach` on zeros.

    Args:
        group: of the parameters.
        divisors: of the gradients, (P,).
        applies: (P,) bool.
    """
    beta1, _ = group.betas
    directions = list(torch._foreach_div(group.gradients, foreach.one_by_one(divisors)))
    torch._foreach_add_(directions, group.weights, alpha=group.weight_decay)
    directions = foreach.or_zero(directions, applies, -0.0)
    decays = torch.where(applies, beta1, torch.ones_like(divisors))
    torch._foreach_mul_(group.momenta, foreach.one_by_one(decays))
    torch._foreach_add_(group.momenta, directions, alpha=group.share)
    steps = list(torch._foreach_mul(group.momenta, group.rate))
    torch._foreach_sub_(group.weights, foreach.or_zero(steps, applies, 0.0))
