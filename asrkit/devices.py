"""Tensors and devices: where constants are made, copies that do not wait, and autocast."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Arguments for making constants, whatever torch's defaults are.
CPU_FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
CPU_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; the CPU does not wait for a copy from the host to a GPU.

    Such a copy starts from pinned memory, which the caching allocator keeps until it has been read.
    A copy back to the host does wait.

    Args:
        tensor: On the host, or on `device` already.
        device: Device to copy it to.
    """
    if device.type == "cpu":
        return tensor.to(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


def read_later(tensor: torch.Tensor) -> Callable[[], list[float]]:
    """A call that returns the numbers of a vector, which are copied to the host meanwhile.

    Neither the host nor the device waits for the copy of a GPU's tensor. The call waits for it and
    for what was queued before it, not for later work.

    Args:
        tensor: The vector. One on a CPU must keep its numbers until they are read.
    """
    copy = tensor.detach().to("cpu", non_blocking=True)  # from a GPU to pinned memory
    copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def read() -> list[float]:
        if copied is not None:
            copied.synchronize()
        return copy.tolist()

    return read


def readable(tensor: torch.Tensor) -> bool:
    """Whether Python can read the numbers of `tensor` without waiting.

    Those on a GPU have to be waited for. Fake tensors, and those in a graph of torch.compile, have
    none.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch._guards.detect_fake_mode(tensor) is None


def autocast(
    device_type: str, dtype: torch.dtype | None = None
) -> contextlib.AbstractContextManager[object]:
    """torch.autocast of a device to `dtype`; off for None and float32, even inside another.

    Device "meta", on which a step is traced without its numbers, has no autocast: nothing happens.
    """
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    enabled = dtype not in (None, torch.float32)
    context = torch.autocast(device_type, dtype, enabled=enabled)
    return _without_onednn(context) if (device_type, dtype) == ("cpu", torch.float16) else context


@contextlib.contextmanager
def _without_onednn(context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """A block in `context` without oneDNN, which cannot compute an LSTM in float16 on most CPUs."""
    (before,) = torch.backends.mkldnn.set_flags(False, None, None, None)[:1]
    try:
        with context:
            yield
    finally:
        torch.backends.mkldnn.set_flags(before, None, None, None)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """dtype that autocast computes in on a device; None where it is off or not available."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
