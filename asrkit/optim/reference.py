"""LAMB as its formula is written, tensor after tensor: what the fast ones are held to."""

import torch
from torch import Tensor

from asrkit.optim.step import Coefficients, Tensors


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """||x||^2 of each tensor, (N,).

    Args:
        tensors: of any shapes, at least one.
    """
    squares = [tensor.square().sum() for tensor in tensors]
    return torch.stack(squares)


def moments(tensors: Tensors, coefficients: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """Update both moving averages where the step applies.

    Args:
        tensors: of a parameter group.
        coefficients: of this step.

    Returns:
        (squares, updates): ||p||^2 and ||u||^2 of each tensor, (2, N), and the updates u.
    """
    beta1, beta2 = coefficients.betas
    updates = []
    for i in range(len(tensors.weights)):
        gradient = tensors.gradients[i] * coefficients.scale
        exp_avg = beta1 * tensors.exp_avgs[i] + (1 - beta1) * gradient
        exp_avg_sq = beta2 * tensors.exp_avg_sqs[i] + (1 - beta2) * gradient.square()
        replace(tensors.exp_avgs[i], exp_avg, coefficients.applies[i])
        replace(tensors.exp_avg_sqs[i], exp_avg_sq, coefficients.applies[i])
        first, second = coefficients.corrections
        update = direction(
            tensors.weights[i],
            tensors.exp_avgs[i],
            tensors.exp_avg_sqs[i],
            corrections=(first[i], second[i]),
            eps=coefficients.eps,
            weight_decay=coefficients.weight_decay,
        )
        updates.append(update)
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
        updates: u of each tensor.
    """
    for i in range(len(tensors.weights)):
        weight = tensors.weights[i]
        replace(weight, weight - rates[i] * updates[i], coefficients.applies[i])


def direction(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    corrections: tuple[Tensor, Tensor],
    eps: float,
    weight_decay: float,
) -> Tensor:
    """u of a tensor: Adam's update with its weight decay.

    Args:
        weight: before the step.
        exp_avg: moving average of its gradients.
        exp_avg_sq: moving average of their squares.
        corrections: 1 - beta1^t and 1 - beta2^t, () each.
        eps: added to the root of the second average.
        weight_decay: share of the weight that is added.
    """
    first, second = corrections
    adam = exp_avg / first / ((exp_avg_sq / second).sqrt() + eps)
    return adam + weight_decay * weight


def replace(tensor: Tensor, value: Tensor, applies: Tensor) -> None:
    """Write `value` into `tensor` where `applies`, (): no host learns whether it does.

    Args:
        tensor: changed in place.
        value: of its shape.
        applies: bool, ().
    """
    tensor.copy_(torch.where(applies, value, tensor))
