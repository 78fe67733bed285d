"""Dtype and device of a model whose layers others may have replaced.

A quantizer may leave a layer without parameters, or with whole numbers as weights.
"""

import torch
from torch import nn


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype that a module computes in: that of its first floating-point weight or buffer.

    It is float32 where there is none, which is what layers of 8-bit numbers take and return.

    Args:
        module: A model or a part of one.
    """
    for weight in module.parameters():
        if weight.is_floating_point():
            return weight.dtype
    for buffer in module.buffers():
        if buffer.is_floating_point():
            return buffer.dtype
    return torch.float32


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
