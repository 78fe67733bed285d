"""The optimizer of a run, its step, also for your own loop, and averages of the weights (EMA)."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.models.presets import Model
from asrkit.optim import Lamb, NovoGrad
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.objective import training_loss

FIRST_SCALE = 2.0**16  # of the loss in float16
UNSCALED = torch.amp.GradScaler(enabled=False)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run, with a learning rate of 0 until `set_rate`.

    Args:
        model: Model whose parameters it updates.
        config: Names the optimizer and its weight decay. LAMB also takes `clip`. NovoGrad divides
            gradients by their norms instead.
    """
    options: dict[str, Any] = {"lr": 0.0, "weight_decay": config.weight_decay}
    if config.optimizer == "novograd":
        return NovoGrad(model.parameters(), **options)
    options["betas"] = (0.9, 0.98)
    if config.optimizer == "lamb":
        return Lamb(model.parameters(), clip=config.clip, **options)
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def make_scaler(config: TrainConfig, device: torch.device, count: int) -> torch.amp.GradScaler:
    """Scales the loss in float16, where small gradients would become 0; else it does nothing.

    Args:
        config: Has the precision.
        device: Device of the model.
        count: Number of processes, by which `backward` multiplies the loss too.
    """
    enabled = config.dtype(device) == torch.float16
    return torch.amp.GradScaler(device.type, FIRST_SCALE / count, enabled=enabled)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups; in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    config: TrainConfig,
    scaler: torch.amp.GradScaler = UNSCALED,
) -> Tensor:
    """Norm of the gradient of `loss` before clipping, a scalar, after one optimizer step.

    An optimizer with `clips_gradients = True` clips gradients itself. One with an attribute
    `gradient_norm`, like those of `asrkit.optim`, supplies the norm. The gradients are freed at
    once: they would otherwise add to the activations of the next forward pass. The host reads
    nothing from the device, unless the optimizer cannot skip a step by itself.

    A loss or a gradient that is not finite makes no step: weights and optimizer state stay as they
    are, and the norm is not finite. The forward pass has updated the running statistics of batch
    norms by then, and your loop may average weights: keep a copy of the statistics, and check the
    norm before averaging. `train` does both.

    Args:
        model: Model whose parameters get the gradient.
        optimizer: Optimizer of these parameters.
        loss: A scalar with a graph.
        config: Its `clip` is the largest norm, for an optimizer that does not clip.
        scaler: Scales the loss of a model in float16, and lowers its scale after a step whose
            gradient is not finite. The norm is that of the unscaled gradient.
    """
    backward(model, loss, scaler)
    return step_and_clear(model, optimizer, config, scaler)


def backward(
    model: nn.Module,
    loss: Tensor,
    scaler: torch.amp.GradScaler = UNSCALED,
    factor: float = 1.0,
) -> None:
    """Backward pass of `factor` times a loss. If the loss is not finite, neither is the gradient.

    A loss may be NaN with a gradient of zero. If one process has such a loss, no process may step.

    Args:
        model: Model whose parameters get the gradient.
        loss: A scalar with a graph.
        scaler: Scales the gradients, until `step_and_clear` undoes it.
        factor: Scales the gradients permanently.
    """
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    scaler.scale(factor * loss + 0 * loss.detach() * weight.sum()).backward()


def step_and_clear(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    scaler: torch.amp.GradScaler = UNSCALED,
) -> Tensor:
    """The part of `update` after the backward pass."""
    scaler.unscale_(optimizer)
    if hasattr(optimizer, "gradient_norm"):
        optimizer.step()
        norm = optimizer.gradient_norm
    else:
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not getattr(optimizer, "clips_gradients", False):
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.clip, norm)
        _step_if_finite(optimizer, norm)
    optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return norm


def _step_if_finite(optimizer: Any, norm: Tensor) -> None:
    """Step if the norm of the gradients is finite; else leave weights and state as they are.

    torch's fused optimizers decide that on the device, by the flag that loss scaling uses. For any
    other optimizer the host has to read the norm.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = None
        optimizer.found_inf = norm.isfinite().logical_not().float()
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
    elif bool(norm.isfinite()):
        optimizer.step()


class Averages:
    """Moving averages of the weights and floating-point buffers of a model; at first, their values.

    torch's `AveragedModel` copies its counter to the device at each step, which waits for it.

    Args:
        model: The model. `module`, a copy of it, has the averages.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = deepcopy(model)

    @torch.no_grad()
    def move(self, model: nn.Module, share: Tensor) -> None:
        """Move the averages towards the present values; whole numbers are copied.

        Args:
            model: The model with its present weights.
            share: Part of the distance, from 0 to 1, a scalar on the model's device. With 0 the
                averages stay as they are.
        """
        averages = [*self.module.parameters(), *self.module.buffers()]
        values = [*model.parameters(), *model.buffers()]
        for whole in [n for n, one in enumerate(averages) if not one.is_floating_point()][::-1]:
            averages.pop(whole).copy_(values.pop(whole))
        distances = torch._foreach_sub(values, averages)
        torch._foreach_mul_(distances, share)
        torch._foreach_add_(averages, distances)


def training_step(
    model: Model, optimizer: torch.optim.Optimizer, config: TrainConfig | None = None
) -> Callable[[int, float, int], None]:
    """step(n, seconds, tokens) for `asrkit.data.oom_search`: trains on n random utterances.

    Its memory includes the batch. It does not include the prefetching of batches or the EMA
    weights. With joint="auto" the step changes to the lean loss where the joint would fill half of
    the device; more utterances may then take less memory. To fill the device, search with
    joint="full" or "lean".

    Args:
        model: A model in training mode; its weights change.
        optimizer: Optimizer of its parameters.
        config: Settings of the run; None takes the defaults.
    """
    settings = config or TrainConfig()
    device = next(model.parameters()).device
    features = settings.features

    def step(n: int, seconds: float, tokens: int) -> None:
        """One step on `n` utterances of noise, each of `seconds` and `tokens`."""
        T = features.frames(round(seconds * features.rate_hz))
        batch = Prepared(
            features=torch.randn(n, T, features.bins, device=device),
            lengths=torch.full((n,), T, device=device),
            targets=torch.randint(model.blank, (n, tokens), device=device),
            target_lengths=torch.full((n,), tokens, device=device),
            speech_s=n * seconds,
        )
        loss = training_loss(model, batch, settings).per_label
        update(model, optimizer, loss, settings)

    return step
