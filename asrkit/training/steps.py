"""One step of training: the optimizer's update, and a step as `asrkit.data.oom_search` wants it."""

from collections.abc import Callable

import torch
from torch import Tensor

from asrkit.models import TransducerModel
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.objective import training_loss


def update(
    model: TransducerModel, optimizer: torch.optim.Optimizer, loss: Tensor, config: TrainConfig
) -> Tensor:
    """Norm of the gradient of `loss` before clipping, a scalar, after one optimizer step.

    A gradient that is not finite makes no step. The gradients are dropped at once: else they would
    lie beside the activations of the next forward pass.

    Args:
        model: Whose parameters get the gradient.
        optimizer: Over these parameters.
        loss: A scalar with a graph.
        config: Its `clip` is the largest norm.
    """
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    if bool(norm.isfinite()):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def training_step(
    model: TransducerModel, optimizer: torch.optim.Optimizer, config: TrainConfig | None = None
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
    rate_hz = settings.features.rate_hz
    hop_samples = settings.features.hop_samples

    def step(n: int, seconds: float, tokens: int) -> None:
        """One step on noise: `n` utterances of `seconds` and `tokens` each."""
        T = max(1, round(seconds * rate_hz) // hop_samples)
        batch = Prepared(
            features=torch.randn(n, T, settings.features.bins, device=device),
            lengths=torch.full((n,), T, device=device),
            targets=torch.randint(model.blank, (n, tokens), device=device),
            target_lengths=torch.full((n,), tokens, device=device),
            speech_s=n * seconds,
        )
        loss = training_loss(model, batch, settings).per_label
        update(model, optimizer, loss, settings)

    return step
