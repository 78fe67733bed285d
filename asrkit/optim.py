"""Optimizers that torch lacks: LAMB for large batches, NovoGrad for Jasper.

Both are torch.optim.Optimizers whose step never waits for a GPU: the host reads no value. If a
gradient is not finite, or its norm overflows, weights and state stay as they are. The learning rate
may be a tensor (), and steps are counted in tensors, so that a CUDA graph of a step reads both.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from asrkit.shapes import expect, is_finite

MIN_EPS = 1e-30  # below the root of float32's smallest number, yet not 0, as 0 / 0 is NaN
Updated = list[tuple[dict[str, Any], list[Any]]]  # groups, and their parameters with a gradient


class _NoWaitOptimizer(torch.optim.Optimizer):
    """Base of Lamb and NovoGrad.

    Attributes:
        clips_gradients: True: a training loop need not clip before a step.
        gradient_norm: Norm of all gradients in the last step, before clipping, (); None at first.
    """

    clips_gradients = True

    def __init__(self, params: Any, settings: dict[str, Any]) -> None:
        self.gradient_norm: Tensor | None = None
        # torch keeps the steps on the device where `capturable` is true
        super().__init__(params, settings | {"capturable": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch.optim does.

        Args:
            param_group: "params", and settings that differ from the defaults.

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
            closure: Recomputes the loss and its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated: Updated = []
        for group in self.param_groups:
            parameters = [weight for weight in group["params"] if weight.grad is not None]
            dense = not any(weight.grad.is_sparse for weight in parameters)
            remedy = "Pass sparse=False to the embedding."
            expect(dense, "params", "dense gradients", "a sparse one", remedy)
            if parameters:
                updated.append((group, parameters))
        if updated:
            self._update(updated)
        return loss

    def _update(self, updated: Updated) -> None:
        """Update the parameters of each group. All have a gradient."""
        raise NotImplementedError

    def _states(
        self, parameters: list[Any], zero_squares: Callable[[Tensor], Tensor]
    ) -> list[dict[str, Any]]:
        """State of each parameter; zeros before its first step."""
        for weight in parameters:
            if not self.state[weight]:
                self.state[weight] |= {
                    "step": torch.zeros((), device=weight.device, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": zero_squares(weight),
                }
        return [self.state[weight] for weight in parameters]


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


class Lamb(_NoWaitOptimizer):
    """LAMB: Adam with updates scaled to `lr` times the norm of each parameter.

        g <- g / max(1, ||g|| / clip)                    ||g|| over all parameters
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        p <- p - lr (||p|| / ||u||) u                    norms of each parameter

    The ratio of norms is 1 where either is 0, and in groups without weight decay. The step clips
    the gradients in place: do not clip before. torch's fused kernel computes Adam's part.

    Source: You et al., arXiv 1904.00962, algorithm 2, as NVIDIA's apex computes it: the norm of the
    weights is not clamped, and the weight decay is part of the update. Settings of MLPerf's RNN-T:
    betas (0.9, 0.9985), eps 1e-9, weight_decay 1e-3, clip 1.

    Args:
        params: Parameters in float32 or float64, or dicts of parameter groups, as in torch.optim.
        lr: Learning rate, at least 0. A tensor () on the parameters' device may be overwritten
            between steps.
        betas: Decay of the moving averages of gradients and of their squares, from 0 to below 1.
        eps: Added to the root of the second average, at least 0. Smaller values count as 1e-30, so
            that u is weight_decay p where all gradients were zeros.
        weight_decay: Share of the weights that is added to the update, at least 0.
        clip: Largest norm of the gradient of all parameters; above 0, math.inf for no limit.

    Raises:
        ValueError: An argument out of range, or parameters in half precision.
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

    def _update(self, updated: Updated) -> None:
        gradients = [weight.grad for _, parameters in updated for weight in parameters]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.gradient_norm = norm
        applies = norm.isfinite()
        divisor = (norm / self.clip).clamp(min=1)
        if divisor.dtype == torch.float64:  # the kernel would divide by it in float32
            torch._foreach_div_(gradients, divisor)
            divisor = torch.ones_like(divisor)
        for group, parameters in updated:
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
            group: Group of the parameters, with its settings.
            parameters: Parameters with gradients. Their state changes, their values do not.
            divisor: Number that gradients are divided by, ().
            applies: Whether the state changes, ().
        """
        states = self._states(parameters, torch.zeros_like)
        # Adam adds -lr times its update to its parameters; with lr -1 they become u.
        updates = list(torch._foreach_mul(parameters, group["weight_decay"]))
        beta1, beta2 = group["betas"]
        adam(
            updates,
            [_with_layout_of(weight, weight.grad) for weight in parameters],
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
            eps=max(group["eps"], MIN_EPS),
            maximize=False,
        )
        return updates


def _with_layout_of(weight: Tensor, gradient: Any) -> Tensor:
    """The gradient with the strides of its weight, which torch's fused kernel assumes."""
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)


class NovoGrad(_NoWaitOptimizer):
    """NovoGrad: momentum over gradients that are divided by the norm of their tensor.

        v <- ||g||^2                                     of each tensor, at its first step
        v <- beta2 v + (1 - beta2) ||g||^2               from then on
        m <- beta1 m + g / (sqrt(v) + eps) + weight_decay p
        p <- p - lr m

    With beta2 = 0, as Jasper was trained, each gradient has norm 1, so neither the scale of a loss
    nor clipping matters. There is no bias correction. v is one number a tensor: the state is half
    of Adam's.

    Source: B. Ginsburg et al., arXiv 1905.11286, algorithm 1, as NVIDIA's training of Jasper
    computes it, whose settings are the defaults.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([600.0, 800.0])
    >>> NovoGrad([weight], 0.5, weight_decay=0.0).step()
    >>> weight.detach()
    tensor([2.7000, 3.6000])

    Args:
        params: Parameters in float32 or float64, or dicts of parameter groups, as in torch.optim.
        lr: Learning rate, at least 0. A tensor () on the parameters' device may be overwritten
            between steps.
        betas: Decay of the momentum and of the squared norms, from 0 to below 1.
        eps: Added to the norm, at least 0. With 0, a gradient of zeros stays zeros too.
        weight_decay: Share of the weights that is added to the gradient, at least 0.

    Raises:
        ValueError: An argument out of range, or parameters in half precision.
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

    def _update(self, updated: Updated) -> None:
        norms = []
        for _, parameters in updated:
            gradients = [weight.grad for weight in parameters]
            norms.append(torch.stack(torch._foreach_norm(gradients)))
        self.gradient_norm = torch.linalg.vector_norm(torch.cat(norms))
        applies = self.gradient_norm.isfinite()
        for (group, parameters), norm in zip(updated, norms, strict=True):
            states = self._states(parameters, lambda weight: weight.new_zeros(()))
            divisors = self._divisors(group, states, norm, applies)
            momenta = [state["exp_avg"] for state in states]
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
        self, group: dict[str, Any], states: list[dict[str, Any]], norm: Tensor, applies: Tensor
    ) -> Tensor:
        """sqrt(v) + eps of each parameter, (N,), after the update of v and steps.

        Args:
            group: Group of the parameters, with its settings.
            states: States of N parameters.
            norm: Norm of each gradient, (N,).
            applies: Whether v and steps change, bool ().
        """
        steps = [state["step"] for state in states]
        averages = [state["exp_avg_sq"] for state in states]
        beta2 = group["betas"][1]
        before = torch.stack(averages)
        moved = beta2 * before + (1 - beta2) * norm.square()
        moved = torch.where(torch.stack(steps) == 0, norm.square(), moved)
        after = torch.where(applies, moved, before)
        torch._foreach_copy_(averages, after.unbind())
        torch._foreach_add_(steps, [applies.float()] * len(steps))
        divisors = after.sqrt() + group["eps"]
        return torch.where(divisors > 0, divisors, 1)  # eps=0, and no gradient so far
