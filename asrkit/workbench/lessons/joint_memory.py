"""Notebook 02: seven variants of the joint and its loss, and the memory of each."""

import copy
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from asrkit.losses import pack_joint, rnnt_loss, rnnt_loss_lean, rnnt_loss_packed, split_batches
from asrkit.shapes import expect
from asrkit.workbench.measure import peak_memory
from asrkit.workbench.tables import percent

Inputs = Sequence[Tensor]  # encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,)
Targets = tuple[Any, ...]  # labels (B, U), frames (B,) and numbers of labels (B,)
LARGEST_ERROR = 0.05  # relative error of a predicted peak


def join(encoded: Tensor, predicted: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The whole joint: logits (B, T, U1, V)."""
    hidden = (encoded[:, :, None] + predicted[:, None]).relu()
    return linear(hidden, weight, bias)


def dense(inputs: Inputs, targets: Targets, **options: Any) -> Tensor:
    """The loss on the whole joint, with options of `rnnt_loss`."""
    return rnnt_loss(join(*inputs), *targets, **options)


def packed(inputs: Inputs, targets: Targets) -> Tensor:
    """The loss on a joint without padding."""
    encoded, predicted, weight, bias = inputs
    _, *lengths = targets
    hidden = pack_joint(encoded, predicted, *lengths, activation="relu")  # (N, D)
    return rnnt_loss_packed(linear(hidden, weight, bias), *targets)


def split(inputs: Inputs, targets: Targets) -> Tensor:
    """The loss with the joint of one utterance at a time."""
    encoded, predicted, weight, bias = inputs
    joint = partial(join, weight=weight, bias=bias)
    return split_batches(joint, encoded, predicted, *targets, size=1)


def lean(inputs: Inputs, targets: Targets, **options: Any) -> Tensor:
    """The loss without the joint, with options of `rnnt_loss_lean`."""
    return rnnt_loss_lean(*inputs, *targets, activation="relu", **options)


VARIANTS = {
    "torchaudio": partial(dense, impl="torchaudio"),
    "wavefront": partial(dense, impl="wavefront"),
    "numba": partial(dense, impl="numba_cpu"),
    "overwrite": partial(dense, impl="numba_cpu", overwrite_logits=True),
    "split": split,
    "packed": packed,
    "lean": lean,
}


def joint_inputs(
    B: int, T: int, U1: int, V: int, D: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """Random tensors encoded, predicted, weight and bias, which require gradients."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for size in ((B, T, D), (B, U1, D), (V, D), (V,)):
        values = 0.1 * torch.randn(size, generator=generator)
        inputs.append(values.to(dtype).requires_grad_())
    return inputs


def targets_of(lengths: Tensor, label_lengths: Tensor, V: int, *, seed: int = 0) -> Targets:
    """Random labels (B, U) and the lengths; blank, the last of V tokens, is no label."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), int(label_lengths.max()))
    return torch.randint(0, V - 1, size, generator=generator), lengths, label_lengths


def full_targets(B: int, T: int, U: int, V: int, *, seed: int = 0) -> Targets:
    """Random labels for utterances that all have full length."""
    return targets_of(torch.full((B,), T), torch.full((B,), U), V, seed=seed)


def loss_of_zeros(size: tuple[int, ...], dtype: torch.dtype, *targets: Any) -> Tensor:
    """The loss of logits (B, T, U1, V) that are all 0, without a joint."""
    logits = torch.zeros(size, dtype=dtype, requires_grad=True)
    return rnnt_loss(logits, *targets, impl="numba_cpu")


def peak_B(
    loss: Callable[..., Tensor], *arguments: Any, device: str = "cpu", **options: Any
) -> int:
    """Peak memory in bytes of a loss and its gradients, without memory allocated before.

    Args:
        loss: The loss, which is run forward and backward.
        *arguments: Arguments of the loss; its leaves have gradients afterwards.
        device: "cpu" or "cuda".
        **options: Keyword arguments of the loss.
    """
    # The first call compiles, and the compiler keeps references to its tensors.
    loss(*copy.deepcopy(arguments), **options).backward()
    gc.collect()  # so that nothing is freed during the measurement
    return peak_memory(lambda: loss(*arguments, **options).backward(), device=device)


def check_prediction(name: str, measured: float, predicted: float) -> None:
    """Raise ValueError unless a measured peak, in bytes, is within 5 % of the prediction."""
    error = measured / predicted - 1
    wanted = f"within {percent(LARGEST_ERROR)} of the predicted {predicted:.4g} B"
    expect(abs(error) < LARGEST_ERROR, name, wanted, f"{measured:.4g} B ({percent(error, 1)})")


def gradient_error(inputs: Inputs, expected: Sequence[Tensor]) -> float:
    """The largest relative error of the inputs' gradients."""
    errors = []
    for leaf, gradient in zip(inputs, expected, strict=True):
        assert leaf.grad is not None
        errors.append(float((leaf.grad - gradient).norm() / gradient.norm()))
    return max(errors)
