"""One step of LAMB over all tensors: what the implementations share.

    g <- g / max(1, ||g|| / clip)                    ||g|| over all parameters
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
    p <- p - rate (||p|| / ||u||) u                  norms of each parameter

The ratio of norms is 1 where either is 0. Source: You et al., arXiv 1904.00962, algorithm 2, as
NVIDIA's apex computes it (csrc/multi_tensor_lamb.cu): the norm of the weights is not clamped, and
the weight decay is part of the update, not of the gradient.

Nothing here reads a value on the host, so a GPU never waits: a gradient that is not finite is
skipped by `torch.where`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asrkit.optim.norms import Norms


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What one rank holds of the N tensors of a parameter group, in the order of their owners.

    A tensor is a whole parameter, or a part of one; N may be 0.

    Attributes:
        weights: N tensors, updated in place.
        gradients: N tensors of the same shapes, which stay as they are.
        exp_avgs: moving averages of the gradients, updated in place.
        exp_avg_sqs: moving averages of their squares, updated in place.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a parameter group.

    Attributes:
        rate: learning rate, ().
        betas: decay of both moving averages.
        eps: added to the root of the second one.
        weight_decay: share of the weights that is added to the update.
        ratio: whether an update is scaled by ||p|| / ||u||.
        bias_correction: whether the averages are divided by 1 - beta^t.
    """

    rate: Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    ratio: bool
    bias_correction: bool


@dataclass(frozen=True, kw_only=True)
class Group:
    """The P parameters of a parameter group and what a rank holds of them.

    Attributes:
        tensors: of this rank.
        settings: of the group.
        norms: from what the tensors hold to what the parameters hold.
        steps: P tensors (), the updates that each parameter has had; counted on in place.
        present: (P,) bool, whether a parameter has a gradient on any rank.
    """

    tensors: Tensors
    settings: Settings
    norms: Norms
    steps: list[Tensor]
    present: Tensor


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The numbers of one step, for each of the N tensors or for all of them.

    Attributes:
        scale: factor of the gradients that clips their norm, (); finite and above 0.
        applies: (N,) bool, whether a tensor is updated: else its state stays bit for bit.
        corrections: 1 - beta1^t and 1 - beta2^t, (N,) each; above 0 where `applies`.
        betas: as in `Settings`.
        eps: as in `Settings`.
        weight_decay: as in `Settings`.
    """

    scale: Tensor
    applies: Tensor
    corrections: tuple[Tensor, Tensor]
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Kernels(Protocol):
    """What an implementation provides, as a module with these functions."""

    def squared_norms(self, tensors: list[Tensor]) -> Tensor:
        """||x||^2 of each tensor, (N,).

        Args:
            tensors: of any shapes, at least one.
        """

    def moments(self, tensors: Tensors, coefficients: Coefficients) -> tuple[Tensor, list[Tensor]]:
        """Update both moving averages, in place, where the step applies.

        Args:
            tensors: of a parameter group, at least one.
            coefficients: of this step.

        Returns:
            (squares, updates): ||p||^2 and ||u||^2 of each tensor, (2, N); and the updates u for
            `move`, none where it computes them again.
        """

    def move(
        self,
        tensors: Tensors,
        coefficients: Coefficients,
        rates: Tensor,
        updates: list[Tensor],
    ) -> None:
        """p <- p - rate u, in place, where the step applies.

        Args:
            tensors: as `moments` took and updated them.
            coefficients: of this step.
            rates: (N,) learning rate times ratio, for each tensor.
            updates: as `moments` returned them.
        """


def lamb_step(groups: Sequence[Group], *, clip: float, kernels: Kernels) -> Tensor:
    """Norm of all gradients before clipping, (), after an update of weights and state.

    Args:
        groups: at least one, all on one device.
        clip: largest norm of the gradients; above 0, inf for no limit.
        kernels: the implementation.
    """
    squares = [_gradient_squares(group, kernels) for group in groups]
    norm = torch.cat(squares).sum().sqrt()
    finite = norm.isfinite()
    scale = 1 / (norm / clip).clamp(min=1)
    scale = torch.where(finite, scale, 1)
    for group in groups:
        applies = group.present & finite
        count_steps(group.steps, applies)
        coefficients = _coefficients(group, scale, applies)
        squares_of_tensors = scale.new_zeros(2, 0)
        updates: list[Tensor] = []
        if group.tensors.weights:
            squares_of_tensors, updates = kernels.moments(group.tensors, coefficients)
        ones = torch.ones_like(applies, dtype=scale.dtype)
        rates = ones * group.settings.rate.to(scale.dtype)
        if group.settings.ratio:
            weight_squares, update_squares = group.norms.total(squares_of_tensors)
            rates = rates * trust_ratio(weight_squares, update_squares)
        if group.tensors.weights:
            rates_of_tensors = group.norms.of_tensors(rates)
            kernels.move(group.tensors, coefficients, rates_of_tensors, updates)
    return norm


def trust_ratio(weight_squares: Tensor, update_squares: Tensor) -> Tensor:
    """||p|| / ||u|| of each parameter, (P,); 1 where either norm is 0.

    Args:
        weight_squares: (P,) ||p||^2.
        update_squares: (P,) ||u||^2.
    """
    both = (weight_squares > 0) & (update_squares > 0)
    ratio = weight_squares.sqrt() / update_squares.sqrt()
    return torch.where(both, ratio, 1)


def _gradient_squares(group: Group, kernels: Kernels) -> Tensor:
    """||g||^2 of each parameter, (P,), summed over ranks."""
    squares = group.settings.rate.new_zeros(0, dtype=group.norms.dtype)
    if group.tensors.gradients:
        squares = kernels.squared_norms(group.tensors.gradients)
    return group.norms.total(squares[None])[0]


def count_steps(steps: list[Tensor], applies: Tensor) -> None:
    """Add 1 to the steps of the parameters that are updated.

    Args:
        steps: P tensors (), changed in place.
        applies: (P,) bool, whether a parameter is updated.
    """
    torch._foreach_add_(steps, list(applies.to(steps[0].dtype).unbind()))


def _coefficients(group: Group, scale: Tensor, applies: Tensor) -> Coefficients:
    settings = group.settings
    steps = torch.stack(group.steps).to(scale.dtype)
    corrections = []
    for beta in settings.betas:
        correction = torch.ones_like(steps)
        if settings.bias_correction:
            correction = bias_correction(beta, steps)
        corrections.append(group.norms.of_tensors(correction))
    first, second = corrections
    return Coefficients(
        scale=scale,
        applies=group.norms.of_tensors(applies),
        corrections=(first, second),
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps, (P,): by expm1, since 1 - beta^t in float32 loses the digits of beta.

    Args:
        beta: decay of a moving average, from 0 to below 1.
        steps: (P,) updates so far.
    """
    if beta == 0:
        return torch.ones_like(steps)
    return -torch.expm1(steps * math.log(beta))
