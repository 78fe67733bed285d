"""Optimizers that torch lacks: LAMB for large batches, NovoGrad for Jasper.

Both are torch.optim.Optimizers whose step never waits: the host reads no value, and a gradient that
is not finite, or whose norm overflows, leaves weights and state as they are. The learning rate may
be a tensor (), and steps are counted in tensors, so that a CUDA graph of a step follows them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from asrkit.shapes import expect, is_finite

LEAST_EPS = 1e-30  # below the root of what float32 can hold, yet not 0: 0 / 0 is no number
Moving = list[tuple[dict[str, Any], list[Any]]]  # groups, and their parameters with a gradient


class _Waitless(torch.optim.Optimizer):
    """What Lamb and NovoGrad share.

    Attributes:
        clips_gradients: true, for loops that would clip before a step.
        gradient_norm: norm of all gradients in the last step, before clipping, (); None before it.
    """

    clips_gradients = True

    def __init__(self, params: Any, settings: dict[str, Any]) -> None:
        self.gradient_norm: Tensor | None = None
        # torch keeps the steps on the device where `capturable` is true
        super().__init__(params, settings | {"capturable": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch.optim does.

        Args:
            param_group: "params", and settings other than the defaults.

        Raises:
            ValueError: A setting out of range, or parameters in half precision.
        """
        super().add_param_group(param_group)
        _check_settings(self.param_groups[-1])
        remedy = "Train in half precision by torch.autocast, which keeps the weights in float32."
        for parameter in self.param_groups[-1]["params"]:
            fits = parameter.dtype in (torch.float32, torch.float64)
            expect(fits, "params", "float32 or float64", parameter.dtype, remedy)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure` returned, or None.

        Args:
            closure: computes the loss and its gradients again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving: Moving = []
        for group in self.param_groups:
            parameters = [weight for weight in group["params"] if weight.grad is not None]
            dense = not any(weight.grad.is_sparse for weight in parameters)
            remedy = "Pass sparse=False to the embedding."
            expect(dense, "params", "dense gradients", "a sparse one", remedy)
            if parameters:
                moving.append((group, parameters))
        if moving:
            self._update(moving)
        return loss

    def _update(self, moving: Moving) -> None:
        """Update the parameters of each group, which all have a gradient."""
        raise NotImplementedError


def _check_settings(group: dict[str, Any]) -> None:
    wanted = "at least 0, and finite"
    for name in ("eps", "weight_decay"):
        expect(is_finite(group[name]) and group[name] >= 0, name, wanted, group[name])
    lr = group["lr"]
    if isinstance(lr, Tensor):
        expect(lr.ndim == 0, "lr", "a number, or a tensor ()", f"shape {tuple(lr.shape)}")
    else:
        expect(is_finite(lr) and lr >= 0, "lr", wanted, lr)
    betas = group["betas"]
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    fits = pair and all(is_finite(beta) and 0 <= beta < 1 for beta in betas)
    expect(fits, "betas", "two numbers from 0 to below 1", betas)


class Lamb(_Waitless):
    """LAMB: Adam, with the update of each parameter as long as `lr` times the parameter itself.

        g <- g / max(1, ||g|| / clip)                    ||g|| over all parameters
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        p <- p - lr (||p|| / ||u||) u                    norms of each parameter

    The ratio of norms is 1 where either is 0, and in groups without weight decay. Clipping, which
    changes the gradients in place, is a part of the step: do not clip before. Adam's part is
    torch's fused kernel.

    Source: You et al., arXiv 1904.00962, algorithm 2, as NVIDIA's apex computes it: the norm of the
    weights is not clamped, and the weight decay is part of the update. Settings of MLPerf's RNN-T:
    betas (0.9, 0.9985), eps 1e-9, weight_decay 1e-3, clip 1.

    Args:
        params: parameters in float32 or float64, or dicts of parameter groups, as of torch.optim.
        lr: learning rate, at least 0; a tensor () on the parameters' device may be filled between
            steps.
        betas: decay of the moving averages of gradients and of their squares, from 0 to below 1.
        eps: added to the root of the second average, at least 0, which counts as 1e-30: where all
            gradients were zeros, u is weight_decay p.
        weight_decay: share of the weights that is added to the update, at least 0.
        clip: largest norm of the gradient of all parameters; above 0, math.inf for no limit.

    Raises:
        ValueError: an argument out of range, or parameters in half precision.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        betas: tuple[float, float],
        eps: float = 1e-6,
        weight_decay: float,
        clip: float = 1.0,
    ) -> None:
        clips = clip == math.inf or (is_finite(clip) and clip > 0)
        expect(clips, "clip", "above 0, math.inf for no limit", clip)
        self.clip = clip
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    def _update(self, moving: Moving) -> None:
        gradients = [weight.grad for _, parameters in moving for weight in parameters]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.gradient_norm = norm
        applies = norm.isfinite()
        divisor = (norm / self.clip).clamp(min=1)
        if divisor.dtype == torch.float64:  # the kernel would divide by it in float32
            torch._foreach_div_(gradients, divisor)
            divisor = torch.ones_like(divisor)
        for group, parameters in moving:
            updates = self._updates(group, parameters, divisor, applies)
            rates = applies.to(norm.dtype) * group["lr"]
            if group["weight_decay"]:
                lengths = torch.stack(torch._foreach_norm(parameters))
                update_lengths = torch.stack(torch._foreach_norm(updates))
                both = (lengths > 0) & (update_lengths > 0)
                rates = rates * torch.where(both, lengths / update_lengths, 1)
            factors = rates.expand(len(parameters)).unbind()
            torch._foreach_addcmul_(parameters, updates, factors, value=-1)

    def _updates(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, applies: Tensor
    ) -> list[Tensor]:
        """u of each parameter; finite in a step that is skipped.

        Args:
            group: of the parameters, with its settings.
            parameters: with gradients; their state changes, they do not.
            divisor: of the gradients, ().
            applies: whether the state changes, ().
        """
        states = [self.state[weight] for weight in parameters]
        for state, weight in zip(states, parameters, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=weight.device, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
        # Adam adds -lr times its update to what it is given: with lr -1 that becomes u.
        updates = list(torch._foreach_mul(parameters, group["weight_decay"]))
        beta1, beta2 = group["betas"]
        adam(
            updates,
            [_laid_out_as(weight, weight.grad) for weight in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=divisor.float(),
            found_inf=applies.logical_not().float(),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=-1.0,
            weight_decay=0.0,
            eps=max(group["eps"], LEAST_EPS),
            maximize=False,
        )
        return updates


def _laid_out_as(weight: Tensor, gradient: Any) -> Tensor:
    """The gradient with the strides of its weight, as torch's fused kernel reads it."""
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)


class NovoGrad(_Waitless):
    """NovoGrad: momentum of gradients that are divided by their norm, tensor by tensor.

        v <- ||g||^2                                     of each tensor, at its first step
        v <- beta2 v + (1 - beta2) ||g||^2               from then on
        m <- beta1 m + g / (sqrt(v) + eps) + weight_decay p
        p <- p - lr m

    With beta2 = 0, as Jasper was trained, each gradient
    has norm 1, so neither the scale of a loss nor clipping matters. Nothing is corrected for its
    bias. v is a number a tensor: the state is half of Adam's.

    Source: B. Ginsburg et al., arXiv 1905.11286, algorithm 1, as NVIDIA's training of Jasper
    computes it, whose settings are the defaults.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([600.0, 800.0])
    >>> NovoGrad([weight], 0.5, weight_decay=0.0).step()
    >>> weight.detach()
    tensor([2.7000, 3.6000])

    Args:
        params: parameters in float32 or float64, or dicts of parameter groups, as of torch.optim.
        lr: learning rate, at least 0; a tensor () on the parameters' device may be filled between
            steps.
        betas: decay of the momentum and of the squared norms, from 0 to below 1.
        eps: added to the norm, at least 0. A gradient of zeros stays zeros with 0 too.
        weight_decay: share of the weights that is added to the gradient, at least 0.

    Raises:
        ValueError: an argument out of range, or parameters in half precision.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.95, 0.0),
        eps: float = 1e-8,
        weight_decay: float = 1e-3,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    def _update(self, moving: Moving) -> None:
        norms = []
        for _, parameters in moving:
            gradients = [weight.grad for weight in parameters]
            norms.append(torch.stack(torch._foreach_norm(gradients)))
        self.gradient_norm = torch.linalg.vector_norm(torch.cat(norms))
        applies = self.gradient_norm.isfinite()
        for (group, parameters), norm in zip(moving, norms, strict=True):
            divisors = self._divisors(group, parameters, norm, applies)
            momenta = [self.state[weight]["exp_avg"] for weight in parameters]
            beta1 = group["betas"][0]
            one = applies.to(norm.dtype)  # 0 in a step that is skipped
            gradients = [torch.where(applies, weight.grad, 0) for weight in parameters]
            torch._foreach_mul_(momenta, torch.where(applies, beta1, torch.ones_like(one)))
            torch._foreach_addcmul_(momenta, gradients, (one / divisors).unbind())
            decays = [one * group["weight_decay"]] * len(momenta)
            torch._foreach_addcmul_(momenta, parameters, decays)
            rates = [one * group["lr"]] * len(momenta)
            torch._foreach_addcmul_(parameters, momenta, rates, value=-1)

    def _divisors(
        self, group: dict[str, Any], parameters: list[Any], norm: Tensor, applies: Tensor
    ) -> Tensor:
        """sqrt(v) + eps of each parameter, (N,), after v and steps moved on where a step applies.

        Args:
            group: of the parameters, with its settings.
            parameters: N with gradients.
            norm: of each gradient, (N,).
            applies: bool, ().
        """
        for weight in parameters:
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), device=weight.device, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = weight.new_zeros(())
        steps = [self.state[weight]["step"] for weight in parameters]
        averages = [self.state[weight]["exp_avg_sq"] for weight in parameters]
        beta2 = group["betas"][1]
        before = torch.stack(averages)
        moved = beta2 * before + (1 - beta2) * norm.square()
        moved = torch.where(torch.stack(steps) == 0, norm.square(), moved)
        after = torch.where(applies, moved, before)
        torch._foreach_copy_(averages, after.unbind())
        torch._foreach_add_(steps, [applies.float()] * len(steps))
        divisors = after.sqrt() + group["eps"]
        return torch.where(divisors > 0, divisors, 1)  # eps=0, and no gradient so far
