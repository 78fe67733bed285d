"""The optimizer of a run, and a step by it, also for a loop of one's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.models.presets import Model
from asrkit.optim import Lamb, NovoGrad
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.objective import training_loss


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run, at a rate of 0 until `set_rate`.

    Args:
        model: Whose parameters it changes.
        config: Which, and its weight decay. LAMB clips gradients too; NovoGrad divides them by
            their norms, so `clip` does not concern it.
    """
    options: dict[str, Any] = {"lr": 0.0, "weight_decay": config.weight_decay}
    if config.optimizer == "novograd":
        return NovoGrad(model.parameters(), **options)
    options["betas"] = (0.9, 0.98)
    if config.optimizer == "lamb":
        return Lamb(model.parameters(), clip=config.clip, **options)
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameter groups a learning rate; where it is a tensor, in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, config: TrainConfig
) -> Tensor:
    """Norm of the gradient of `loss` before clipping, a scalar, after one optimizer step.

    An optimizer that says `clips_gradients = True` scales gradients by itself; one that has a
    `gradient_norm` after its step, as those of `asrkit.optim`, is asked for it. The gradients are
    dropped at once: else they would lie beside the activations of the next forward pass. The host
    reads nothing from the device, unless the optimizer cannot skip a step by itself.

    A loss or a gradient that is not finite makes no step: weights and state of the optimizer stay
    as they are, and the norm is not finite. The forward pass has moved running statistics of batch
    norms before, and averages of weights are your loop's: keep a copy, or look at the norm first.
    `train` restores the one and leaves out the other.

    Args:
        model: Whose parameters get the gradient.
        optimizer: Over these parameters.
        loss: A scalar with a graph.
        config: Its `clip` is the largest norm, for an optimizer that does not clip.
    """
    backward(model, loss)
    return step_and_clear(model, optimizer, config)


def backward(model: nn.Module, loss: Tensor, factor: float = 1.0) -> None:
    """Backward pass of `factor` times a loss; where the loss is not finite, no gradient norm is.

    A loss may be NaN and its gradient be zero. One process with such a loss keeps all from a step.

    Args:
        model: Whose parameters get the gradient.
        loss: A scalar with a graph.
        factor: Of the gradients.
    """
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    (factor * loss + 0 * loss.detach() * weight.sum()).backward()


def step_and_clear(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> Tensor:
    """The part of `update` after the backward pass."""
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
    return norm


def _step_if_finite(optimizer: Any, norm: Tensor) -> None:
    """One step where the norm of the gradients is finite; else weights and state stay as they are.

    torch's fused optimizers decide that on the device, by the flag that they have for loss scaling.
    For any other the host has to read the norm.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = None
        optimizer.found_inf = norm.isfinite().logical_not().float()
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
    elif bool(norm.isfinite()):
        optimizer.step()


def training_step(
    model: Model, optimizer: torch.optim.Optimizer, config: TrainConfig | None = None
) -> Callable[[int, float, int], None]:
    """step(n, seconds, tokens) for `asrkit.data.oom_search`: trains on n random utterances.

    The memory of its batch counts. That of preparing batches does not, which happens beside
    training, nor that of the EMA weights. With joint="auto" the step changes to the lean loss where
    the joint would fill half of the device; more utterances can then take less memory, so search
    with joint="full" or "lean" where the batches are to fill the device.

    Args:
        model: In training mode; its weights change.
        optimizer: Over its parameters.
        config: Settings of the run; the defaults if None.
    """
    settings = config or TrainConfig()
    device = next(model.parameters()).device
    features = settings.features

    def step(n: int, seconds: float, tokens: int) -> None:
        """One step on noise: `n` utterances of `seconds` and `tokens` each."""
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
