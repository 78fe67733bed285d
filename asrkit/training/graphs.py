"""Forward and backward passes of a module as CUDA graphs, one for each of a few lengths.

A graph replays all launches of a pass by one call. This pays where the CPU launches more slowly
than the GPU computes: LSTMs and small batches. Shapes in a graph are fixed, so arguments are padded
to the next of the given lengths. On an H100 losses and gradients equal those of the plain passes;
the gain at sizes of real training is not measured.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.cuda_graphs import capture_training
from asrkit.gpu_waits import CaptureGuard
from asrkit.shapes import expect

Arguments = tuple[Tensor, ...]
# capture(module, arguments) -> a callable that replays the module's passes on such arguments
Capture = Callable[[nn.Module, Arguments], Callable[..., Any]]


def graphed_training(
    module: nn.Module, samples: Sequence[Arguments], lengths: Sequence[int]
) -> "Graphed":
    """`module` as CUDA graphs of its forward and backward pass, one for each length.

    The graphs share one memory pool, so a backward pass must follow its forward pass before another
    forward pass begins. Captures leave `module`, its parameters, buffers and gradients, and torch's
    random numbers unchanged, also if they fail. torch's warning about gradients from another stream
    is switched off: gradients of a graph always come from one.

    Args:
        module: A module on a GPU, in training mode, without hooks. Its control flow must be static
            and read nothing from the device. Lengths among its arguments must be on the device.
        samples: Arguments of `module`, one tuple for each of the `lengths`, with the batch size and
            dtypes of training. Tensors of two dimensions or more have that length in dimension 1.
        lengths: Lengths in ascending order.

    Returns:
        A callable that takes the module's arguments, of these lengths or shorter.

    Raises:
        ValueError: The module is not on a GPU, or lengths and samples do not fit.
        RuntimeError: A pass cannot be captured; the message names its length.
    """
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    expect(on_gpu, "module", "one on a CUDA device", device, "Elsewhere call it as it is.")
    pool = torch.cuda.graph_pool_handle()

    def capture(view: nn.Module, arguments: Arguments) -> Callable[..., Any]:
        """Capture both passes of `view` on `arguments`."""
        with CaptureGuard():
            view(*arguments)
        return capture_training(view, arguments, pool)

    # a pass captured on another stream stays alive, and torch would warn at each step
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with torch.random.fork_rng([device]):
        return Graphed(module, samples, lengths, capture)


class Graphed:
    """Captured passes of a module, called like the module; see `graphed_training`.

    Args:
        module: Module whose parameters the captured passes use.
        samples: Arguments for each length.
        lengths: Lengths in ascending order.
        capture: Captures a shallow copy of the module, which shares its parameters and buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: Sequence[Arguments],
        lengths: Sequence[int],
        capture: Capture,
    ) -> None:
        fits = list(lengths) == sorted(set(lengths)) and len(samples) == len(lengths) > 0
        expect(fits, "lengths", f"ascending ones, one for each of {len(samples)} samples", lengths)
        self.samples = samples
        self.lengths = lengths
        self.passes = list[Callable[..., Any]]()
        # a capture runs the module, which updates the running statistics of batch norms
        before = [buffer.clone() for buffer in module.buffers()]
        try:
            for arguments, length in zip(samples, lengths, strict=True):
                view = copy.copy(module)  # a capture replaces the `forward` of its module
                try:
                    self.passes.append(capture(view, arguments))
                except Exception as error:
                    raise RuntimeError(
                        f"module: its passes at length {length} cannot be captured: {error}"
                    ) from error
        finally:
            with torch.no_grad():
                for buffer, value in zip(module.buffers(), before, strict=True):
                    buffer.copy_(value)

    def __call__(self, *arguments: Tensor) -> Any:
        """Result of the module for `arguments`, padded with zeros to the next length.

        Raises:
            ValueError: Arguments longer than all lengths, or of another batch size.
        """
        longest = max(tensor.shape[1] for tensor in arguments if tensor.dim() > 1)
        place = bisect_left(self.lengths, longest)
        fits = place < len(self.lengths)
        expect(fits, "arguments", f"at most {self.lengths[-1]} in dimension 1", longest)
        padded = [pad_to(tensor, self.lengths[place]) for tensor in arguments]
        wanted = [tuple(tensor.shape) for tensor in self.samples[place]]
        got = [tuple(tensor.shape) for tensor in padded]
        remedy = "Take batches of the samples' size."
        expect(got == wanted, "arguments", f"shapes {wanted}", got, remedy)
        return self.passes[place](*padded)


def pad_to(tensor: Tensor, length: int) -> Tensor:
    """`tensor` zero-padded to `length` in dimension 1; unchanged with fewer than two dimensions."""
    if tensor.dim() < 2:
        return tensor
    later_dims = [0, 0] * (tensor.dim() - 2)
    return F.pad(tensor, [*later_dims, 0, length - tensor.shape[1]])
