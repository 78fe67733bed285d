"""LAMB by torch's calls on lists of tensors: a few kernels for all tensors on a GPU.

A step that does not apply must leave every bit as it is. A product with 0 would not do that: it
keeps NaN. So its gradients and its updates are replaced by zeros whose sign changes no sum:
x + (-0.0) and x - 0.0 are x for every x, -0.0 included. On a GPU it is not timed.
"""

import torch
from torch import Tensor

from asrkit.optim.step import Coefficients, Tensors


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """||x||^2 of each tensor, (N,).

    Args:
        tensors: of any shapes, at least one.
    """
    return torch.stack(torch._foreach_norm(tensors)).square()


def moments(tensors: Tensors, coefficients: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """Update both moving averages where the step applies.

    Args:
        tensors: of a parameter group.
        coefficients: of this step.

    Returns:
        (squares, updates): ||p||^2 and ||u||^2 of each tensor, (2, N), and the updates u.
    """
    beta1, beta2 = coefficients.betas
    applies = coefficients.applies
    one = torch.ones_like(coefficients.corrections[0])
    gradients = or_zero(tensors.gradients, applies, -0.0)
    torch._foreach_mul_(gradients, coefficients.scale)
    torch._foreach_mul_(tensors.exp_avgs, one_by_one(torch.where(applies, beta1, one)))
    torch._foreach_add_(tensors.exp_avgs, gradients, alpha=1 - beta1)
    torch._foreach_mul_(tensors.exp_avg_sqs, one_by_one(torch.where(applies, beta2, one)))
    torch._foreach_addcmul_(tensors.exp_avg_sqs, gradients, gradients, value=1 - beta2)
    updates = _updates(tensors, coefficients)
    squares = torch.stack([squared_norms(tensors.weights), squared_norms(updates)])
    return squares, updates


def move(
    tensors: Tensors, coefficients: Coefficients, rates: Tensor, updates: list[Tensor]
) -> None:
    """p <- p - rate u where the step applies.

    Args:
        tensors: of a parameter group.
        coefficients: of this step.
        rates: (N,) learning rate times ratio, for each tensor.
        updates: u of each tensor; they are overwritten.
    """
    torch._foreach_mul_(updates, one_by_one(rates))
    torch._foreach_sub_(tensors.weights, or_zero(updates, coefficients.applies, 0.0))


def _updates(tensors: Tensors, coefficients: Coefficients) -> list[Tensor]:
    """u of each tensor: Adam's update with its weight decay."""
    correction1, correction2 = coefficients.corrections
    roots = torch._foreach_div(tensors.exp_avg_sqs, one_by_one(correction2))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, coefficients.eps)
    updates = list(torch._foreach_div(tensors.exp_avgs, one_by_one(correction1)))
    torch._foreach_div_(updates, roots)
    torch._foreach_add_(updates, tensors.weights, alpha=coefficients.weight_decay)
    return updates


def or_zero(tensors: list[Tensor], applies: Tensor, zero: float) -> list[Tensor]:
    """New tensors: each as it is where `applies`, else full of `zero`.

    Args:
        tensors: N of any shapes.
        applies: (N,) bool.
        zero: 0.0 or -0.0, whichever changes no sum.
    """
    pairs = zip(tensors, one_by_one(applies), strict=True)
    return [torch.where(applies_here, tensor, zero) for tensor, applies_here in pairs]


def one_by_one(values: Tensor) -> list[Tensor]:
    """N tensors () of the values (N,)."""
    return list(values.unbind())
