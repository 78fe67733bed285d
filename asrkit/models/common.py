"""What several models share: checks of configs and batches, lengths and masks, heads, weights."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asrkit.devices import readable, to_device
from asrkit.memory import return_free_memory
from asrkit.shapes import dims, expect, expect_types, valid_mask

MAPPED_B = 2**24  # bytes of a mapped file that are read before their memory is released
Encoded = tuple[Tensor, Tensor]  # frames (B, T', D) and their lengths (B,)


def expect_sizes(config: Any, names: str) -> None:
    """ValueError unless a config's fields have their types, and each of `names` is at least 1."""
    expect_types(config)
    for name in names.split():
        size = getattr(config, name)
        expect(size >= 1, name, "at least 1", size)


def expect_heads(config: Any) -> None:
    """ValueError unless all attention heads of a config have the same width."""
    expect(
        config.width % config.heads == 0,
        "heads",
        f"a divisor of width={config.width}",
        config.heads,
    )


def expect_batch(features: Tensor, lengths: Tensor, bins: int) -> int:
    """Check features (B, T, bins) and lengths (B,) of a batch, and return T.

    The values of the lengths are checked only where they can be read without waiting for a GPU.

    Raises:
        ValueError: A shape or dtype is wrong, or a length is not in 0..T.
    """
    B, T, _ = dims(features, "B T F", "features", F=bins)
    dims(lengths, "B", "lengths", B=B)
    expect(B > 0 and T > 0, "features", "an utterance and a frame at least", tuple(features.shape))
    expect(
        lengths.dtype in (torch.int32, torch.int64),
        "lengths",
        "int32 or int64",
        lengths.dtype,
        "Pass numbers of frames, not fractions of T.",
    )
    if readable(lengths):
        numbers = lengths.numpy()  # NumPy's min and max add no op of torch
        low, high = numbers.min(), numbers.max()
        expect(0 <= low <= high <= T, "lengths", f"0 to T={T} frames", f"{low} to {high}")
    return T


def strided(frames: Any, stride: int) -> Any:
    """Frames after a layer that strides: ceil(frames / stride), of a number, tensor or array.

    This holds for a convolution with "same" padding, and where `stride` frames are stacked.
    """
    # Not -(-frames // stride): an exported graph would round a negative quotient towards zero.
    return (frames + stride - 1) // stride


def padding_mask(lengths: Tensor, T: int, device: torch.device) -> Tensor | None:
    """(B, T) bool on `device`, True in the padding; None where all lengths are known to be T.

    Lengths on a GPU are not read, so they always give a mask.

    Args:
        lengths: Frames of each utterance (B,).
        T: Frames of the batch.
        device: Device of the mask.
    """
    if readable(lengths) and bool((lengths >= T).all()):
        return None
    return to_device(~valid_mask(lengths, T), device)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, H, N, D / H), a view of x (B, N, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, N, D) from x (B, H, N, D / H)."""
    return x.transpose(1, 2).flatten(2)


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype that a module computes in: that of its first floating-point weight or buffer.

    A model has one dtype, so the first weight decides: every call of an encoder runs this. Weights
    of 8 bits, which a quantizer leaves, do not count. A module without other weights computes in
    float32, which is what quantized layers take and return.
    """
    for weight in chain(module.parameters(), module.buffers()):
        if weight.is_floating_point() and weight.itemsize > 1:
            return weight.dtype
    return torch.float32


@torch.no_grad()
def own_weights(
    model: nn.Module,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    later: Container[int] = (),
) -> None:
    """Give each weight of a model memory of its own on a device: those in a mapped file are copied.

    Args:
        model: The model, which is changed.
        dtype: Dtype of floating-point weights.
        device: The device.
        later: `id` of each weight that is left as it is.
    """
    read_B = 0
    for weight in chain(model.parameters(), model.buffers()):
        if id(weight) in later:
            continue
        to_dtype = dtype if weight.is_floating_point() else weight.dtype
        storage = weight.untyped_storage()
        is_own = storage.resizable() and storage.nbytes() == weight.nbytes  # not of a file
        weight.data = weight.data.to(device, to_dtype, copy=not is_own)
        read_B += weight.nbytes
        if read_B > MAPPED_B:
            return_free_memory()
            read_B = 0
    return_free_memory()


class _Uninitialised(TorchFunctionMode):
    """Skips all functions of torch.nn.init."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs.get("tensor")
        return func(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Make models on the device "meta": their weights have shapes, but no memory and no values.

    Initial weights are not drawn. On "meta" torch would import its compiler to draw them, which
    takes longer than loading a model.
    """
    with torch.device("meta"), _Uninitialised():
        yield
