"""Forward and backward passes of a module as CUDA graphs, one for each of a few lengths.

A graph replays all launches of a pass by one call, which pays where the CPU is slower at launching
than the GPU at computing: LSTMs and small batches. Shapes in a graph are fixed, so arguments are
padded to the next length of a list. On an H100 losses and gradients are those of the plain passes;
at sizes of real training the gain is not measured.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.gpu_waits import CAPTURING, CaptureGuard
from asrkit.shapes import expect

Arguments = tuple[Tensor, ...]
# capture(module, arguments) -> a callable that replays the module's passes on such arguments
Capture = Callable[[nn.Module, Arguments], Callable[..., Any]]


def graphed_training(
    module: nn.Module, samples: Sequence[Arguments], lengths: Sequence[int]
) -> "Graphed":
    """`module` as CUDA graphs of its forward and backward pass, one for each length.

    The graphs share one pool of memory, so a backward pass has to follow its forward pass before
    another forward pass begins. Parameters, buffers, gradients and random numbers are as before,
    also where a capture fails; `module` itself stays as it is. torch's warning of gradients that
    come from another stream is switched off: those of a graph do.

    Args:
        module: On a GPU, in training mode, with a static control flow that reads nothing from the
            device, and without hooks. Lengths among its arguments have to lie on the device.
        samples: Arguments of `module`, one tuple for each of the `lengths`, of the batch size and
            dtypes of training. Tensors of two dimensions or more have that length in dimension 1.
        lengths: The lengths, rising.

    Returns:
        A callable that takes the module's arguments, of these lengths or shorter.

    Raises:
        ValueError: The module is not on a GPU, or lengths and samples do not fit.
        RuntimeError: A pass cannot be captured, and at which length.
    """
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    expect(on_gpu, "module", "one on a CUDA device", device, "Elsewhere call it as it is.")
    pool = torch.cuda.graph_pool_handle()

    def capture(view: nn.Module, arguments: Arguments) -> Callable[..., Any]:
        """Capture both passes of `view` on `arguments`."""
        with CaptureGuard():
            view(*arguments)
        with CAPTURING:
            return torch.cuda.make_graphed_callables(view, arguments, pool=pool)

    # a pass that was captured on another stream stays alive, and torch would say so at each step
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with torch.random.fork_rng([device]):
        return Graphed(module, samples, lengths, capture)


class Graphed:
    """Captured passes of a module, called like the module; see `graphed_training`.

    Args:
        module: Whose parameters the captured passes use.
        samples: Arguments for each length.
        lengths: The lengths, rising.
        capture: Captures a view of the module, which shares its parameters and buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: Sequence[Arguments],
        lengths: Sequence[int],
        capture: Capture,
    ) -> None:
        fits = list(lengths) == sorted(set(lengths)) and len(samples) == len(lengths) > 0
        wanted = f"rising ones, one for each of {len(samples)} samples"
        expect(fits, "lengths", wanted, lengths)
        self.samples = samples
        self.lengths = lengths
        self.passes = list[Callable[..., Any]]()
        # a capture runs the module, which moves the running statistics of batch norms
        before = [buffer.clone() for buffer in module.buffers()]
        try:
            for arguments, length in zip(samples, lengths, strict=True):
                view = copy.copy(module)  # a capture replaces the `forward` of what it is given
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
        """What the module gives for `arguments` that are padded with zeros to the next length.

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
    """`tensor` with zeros behind, up to `length` in dimension 1; as it is with fewer dimensions."""
    if tensor.dim() < 2:
        return tensor
    behind = [0, 0] * (tensor.dim() - 2)
    return F.pad(tensor, [*behind, 0, length - tensor.shape[1]])
