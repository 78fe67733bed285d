"""Dtype and device of a model whose layers others may have replaced.

A quantizer may leave a layer without parameters, or with whole numbers as weights.
"""

import torch
from torch import Tensor, nn

from asrkit.shapes import expect


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype that a module computes in: that of its first floating-point weight or buffer.

    Each call of an encoder asks this, so it looks at the first weight alone: a model has one
    floating-point dtype, which `one_dtype` checks. Numbers of 8 bits, floating-point or not, are a
    quantizer's and do not count. It is float32 where nothing counts, which is what layers of 8-bit
    numbers take and return.

    Args:
        module: A model or a part of one.
    """
    for weight in module.parameters():
        if _counts(weight):
            return weight.dtype
    for buffer in module.buffers():
        if _counts(buffer):
            return buffer.dtype
    return torch.float32


def one_dtype(model: nn.Module) -> torch.dtype:
    """What `dtype_of` returns, once all weights were looked at.

    Args:
        model: Any.

    Raises:
        ValueError: Weights have several floating-point dtypes, so the first would decide by the
            order of the layers.
    """
    found = weight_dtypes(model)
    named = " and ".join(f"{name} in {dtype}" for dtype, name in found.items())
    remedy = "Cast it by model.to(...), or name a precision."
    expect(len(found) <= 1, "model", "floating-point weights of one dtype", named, remedy)
    return dtype_of(model)


def weight_dtypes(model: nn.Module) -> dict[torch.dtype, str]:
    """Floating-point dtypes of a model's weights, each with the name of the first that has it.

    Args:
        model: Any; its buffers are not looked at.
    """
    found: dict[torch.dtype, str] = {}
    for name, weight in model.named_parameters():
        if _counts(weight):
            found.setdefault(weight.dtype, name)
    return found


def _counts(tensor: Tensor) -> bool:
    """Whether a tensor holds floating-point numbers of more than 8 bits."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight or buffer; the CPU where it has none.

    Args:
        module: A model or a part of one.
    """
    for weight in module.parameters():
        return weight.device
    for buffer in module.buffers():
        return buffer.device
    return torch.device("cpu")
