"""From the two halves of a joint to the transducer loss and its gradients, by every implementation.

The halves are encoded (B, T, D) and predicted (B, U1, D); weight (V, D) and bias (V,) are those of
the layer that makes logits of their sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.losses import rnnt_loss, rnnt_loss_lean, split_batches
from asrkit.workbench.bench.cases import Arms

Shape = tuple[int, ...]
Loss = Callable[[], Tensor]
OFFSETS = 2**31  # logits from which torchaudio's offsets of 32 bits end


def joint_inputs(
    shape: Shape, device: str, trained: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Leaves and targets of a joint, seeded with 0.

    Args:
        shape: (B, T, U1, D, V).
        device: of the tensors.
        trained: whether one alignment dominates, as in a trained model. Half of the hidden layer
            then compares the frame with where label u belongs, t_u = (u + 1/2) T / U, and decides
            on blank; the other half holds the label's code. So blank is likely before frame t_u and
            the label from there on; the border is two or three frames wide.

    Returns:
        (encoded, predicted, weight, bias), which require gradients, and (targets, frames, labels)
        with full lengths.
    """
    B, T, U1, D, V = shape
    U = U1 - 1
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, V - 1, (B, U), generator=generator)
    encoded = torch.randn(B, T, D, generator=generator)
    predicted = torch.randn(B, U1, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) / D**0.5
    bias = torch.zeros(V)
    if trained:
        _align(encoded, predicted, weight, targets, generator)
    leaves = []
    for leaf in (encoded, predicted, weight, bias):
        leaves.append(leaf.to(device).requires_grad_())
    frames = torch.full((B,), T)
    labels = torch.full((B,), U)
    rest = [tensor.to(device) for tensor in (targets, frames, labels)]
    return tuple(leaves), tuple(rest)


def _align(
    encoded: Tensor, predicted: Tensor, weight: Tensor, targets: Tensor, generator: torch.Generator
) -> None:
    """Change the leaves in place so that one alignment dominates."""
    T = encoded.shape[1]
    V, D = weight.shape
    U = targets.shape[1]
    places = D // 2  # units that compare the frame with the label's place
    signs = D - places  # units that hold the label's code
    codes = torch.randn(V, signs, generator=generator).sign()
    codes[-1] = 0
    label_codes = codes[targets]
    frame = torch.arange(T)
    place = (torch.arange(U) + 0.5) * T / U
    place = F.pad(place, (0, 1), value=2.0 * T)  # after the last label: blank to the end

    halves = [places, signs]
    frame_places, frame_signs = encoded.split(halves, -1)
    frame_places.copy_(0.5 * frame[:, None])
    frame_signs.mul_(0.3)

    row_places, row_signs = predicted.split(halves, -1)
    row_places.copy_(-0.5 * place[:, None])
    row_codes = F.pad(label_codes, (0, 0, 0, 1))
    row_signs.copy_(2 * row_codes)

    weight_places, weight_signs = weight.split(halves, -1)
    weight_places.zero_()
    weight_places[-1] = -20 / places
    weight_signs.copy_(14 / signs * codes)


class _JointArms:
    """The arms of one joint, each a method that returns the loss."""

    def __init__(self, leaves: tuple[Tensor, ...], rest: Any) -> None:
        self.leaves = leaves
        self.encoded, self.predicted, self.weight, self.bias = leaves
        self.rest = rest
        self.lean = partial(rnnt_loss_lean, *leaves, *rest, activation="tanh")

    def logits(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """The joint of some utterances, (B, T, U1, V)."""
        summed = encoded[:, :, None] + predicted[:, None]
        hidden = torch.tanh(summed)
        return F.linear(hidden, self.weight, self.bias)

    def overwrite(self, impl: Any = "auto") -> Tensor:
        logits = self.logits(self.encoded, self.predicted)
        return rnnt_loss(logits, *self.rest, impl=impl, overwrite_logits=True)

    def torchaudio(self) -> Tensor:
        """torchaudio on a joint that may be under autocast: it takes no bfloat16."""
        logits = self.logits(self.encoded, self.predicted).float()
        return rnnt_loss(logits, *self.rest, impl="torchaudio")

    def split(self) -> Tensor:
        return split_batches(
            self.logits,
            self.encoded,
            self.predicted,
            *self.rest,
            size=1,
            overwrite_logits=True,
        )

    def gradients(self, loss: Loss, half: bool = False) -> tuple[Tensor, ...]:
        """The loss and the gradients of all leaves; `half`: under autocast in bfloat16."""
        device = self.encoded.device.type
        with torch.autocast(device, torch.bfloat16, enabled=half):
            cost = loss()
        gradients = torch.autograd.grad(cost, self.leaves)
        return cost.detach(), *gradients

    def flushed(self) -> tuple[Tensor, ...]:
        """torchaudio with denormal numbers as 0: its gradient holds some, and their products are
        slow.
        """
        torch.set_flush_denormal(True)
        try:
            return self.gradients(self.torchaudio)
        finally:
            torch.set_flush_denormal(False)


def joint_arms(leaves: tuple[Tensor, ...], rest: Any, *, gpu: bool | None = None) -> Arms:
    """Ways from a joint's halves to the loss and the gradients of the leaves, by name.

    Args:
        leaves: encoded, predicted, weight and bias.
        rest: targets and both lengths.
        gpu: whether those of a GPU are among them; None asks where the leaves are.
    """
    joint = _JointArms(leaves, rest)
    if gpu is None:
        gpu = leaves[0].is_cuda
    losses: dict[str, Loss] = {
        "overwrite": joint.overwrite,
        "torchaudio": joint.torchaudio,
        "split": joint.split,
        "lean": joint.lean,
    }
    if gpu:
        losses["lean_triton"] = partial(joint.lean, impl="triton")
    arms: dict[str, Callable[[], Any]] = {}
    for name, loss in losses.items():
        arms[name] = partial(joint.gradients, loss)
    if not leaves[0].is_cuda:
        arms["torchaudio_flushed"] = joint.flushed
    for name, loss in losses.items():
        if name.startswith("lean"):
            arms[f"{name}_bfloat16"] = partial(joint.gradients, loss, half=True)
    if gpu:
        in_place = partial(joint.overwrite, impl="triton")
        arms["torchaudio_bfloat16"] = partial(joint.gradients, joint.torchaudio, half=True)
        arms["joint_triton_bfloat16"] = partial(joint.gradients, in_place, half=True)
    return arms


def excluded_arms(shape: Shape, trained: bool) -> list[str]:
    """Names of the arms that take no part at (B, T, U1, D, V)."""
    B, T, U1, _, V = shape
    names: list[str] = []
    if trained:
        names = ["split", "overwrite"]
    elif B > 4:
        names = ["split"]
    logits = B * T * U1 * V
    if logits >= OFFSETS:
        names += ["torchaudio", "torchaudio_bfloat16"]
    return names
