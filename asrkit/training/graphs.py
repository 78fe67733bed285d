"""Forward and backward passes of a module as CUDA graphs, one for each of a few lengths.

A graph replays all launches of a pass by one call, which pays where the CPU is slower at launching
than the GPU at computing: LSTMs and small batches. Shapes in a graph are fixed, so arguments are
padded to the next length of a list. On an H100 losses and gradients are those of the plain passes;
at sizes of real training the gain is not measured.
"""

import copy
import traceback
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit import runtime
from asrkit.runtime import CAPTURING, CaptureGuard
from asrkit.shapes import expect, whole

Arguments = tuple[Tensor, ...]
# capture(module, arguments) -> a callable that replays the module's passes on such arguments
Capture = Callable[[nn.Module, Arguments], Callable[..., Any]]
TORCH = Path(torch.__file__).parent


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
        RuntimeError: A pass cannot be captured; the message names the line.
    """
    parameter = next(module.parameters(), None)
    device = getattr(parameter, "device", None)
    on_gpu = device is not None and device.type == "cuda"
    expect(on_gpu, "module", "one on a CUDA device", device, "Elsewhere call it as it is.")
    check_lengths(samples, lengths)
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
        return capture_all(module, samples, lengths, capture)


def check_lengths(samples: Sequence[Arguments], lengths: Sequence[int]) -> None:
    """Raise ValueError where `lengths` do not rise, or are not those of `samples`."""
    rising = all(whole(length, 1) for length in lengths) and list(lengths) == sorted(set(lengths))
    expect(rising and bool(lengths), "lengths", "rising whole numbers, at least one", lengths)
    remedy = "Pass one tuple of arguments for each length."
    expect(len(samples) == len(lengths), "samples", f"{len(lengths)}", len(samples), remedy)
    for arguments, length in zip(samples, lengths, strict=True):
        for tensor in arguments:
            fits = tensor.dim() < 2 or tensor.shape[1] == length
            shape = tuple(tensor.shape)
            expect(fits, "samples", f"{length} in dimension 1, as lengths say", shape)


def capture_all(
    module: nn.Module, samples: Sequence[Arguments], lengths: Sequence[int], capture: Capture
) -> "Graphed":
    """The passes of `module` captured for each length; see `graphed_training`.

    A capture runs the module, which moves the running statistics of batch norms: they are put back.

    Args:
        module: Whose parameters the captured passes use.
        samples: Arguments for each length.
        lengths: The lengths.
        capture: Captures a view of the module, which shares its parameters and buffers.
    """
    before = [buffer.clone() for buffer in module.buffers()]
    passes = list[Callable[..., Any]]()
    try:
        for arguments, length in zip(samples, lengths, strict=True):
            view = copy.copy(module)  # a capture replaces the method `forward` of what it is given
            try:
                passes.append(capture(view, arguments))
            except Exception as error:
                raise RuntimeError(
                    f"module: its passes at length {length} cannot be captured, by "
                    f"{line_of(error)}: {error}"
                ) from error
    finally:
        with torch.no_grad():
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)
    return Graphed(passes, samples, lengths)


def line_of(error: BaseException) -> str:
    """ "file:line" of the last frame outside torch and the guard that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    guard = Path(runtime.__file__)
    ours = []
    for frame in frames:
        path = Path(frame.filename)
        if path != guard and not path.is_relative_to(TORCH):
            ours.append(frame)
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


class Graphed:
    """Captured passes of a module, called like the module.

    Args:
        passes: For each length, a callable of arguments of exactly that length.
        samples: The arguments that each was captured with.
        lengths: The lengths, rising.
    """

    def __init__(
        self,
        passes: Sequence[Callable[..., Any]],
        samples: Sequence[Arguments],
        lengths: Sequence[int],
    ) -> None:
        self.passes = passes
        self.shapes = [[tensor.shape for tensor in arguments] for arguments in samples]
        self.lengths = lengths

    def __call__(self, *arguments: Tensor) -> Any:
        """What the module gives for `arguments` that are padded with zeros to the next length.

        Raises:
            ValueError: Arguments longer than all lengths, or of another batch size.
        """
        length = max((tensor.shape[1] for tensor in arguments if tensor.dim() > 1), default=0)
        place = bucket(length, self.lengths)
        padded = [pad_to(tensor, self.lengths[place]) for tensor in arguments]
        shapes = [tensor.shape for tensor in padded]
        wanted = [tuple(shape) for shape in self.shapes[place]]
        got = [tuple(shape) for shape in shapes]
        remedy = "Take batches of the samples' size."
        expect(shapes == self.shapes[place], "arguments", f"shapes {wanted}", got, remedy)
        return self.passes[place](*padded)


def bucket(length: int, lengths: Sequence[int]) -> int:
    """Index of the first of the rising `lengths` that is at least `length`.

    >>> bucket(5, [4, 8, 16])
    1
    """
    place = bisect_left(lengths, length)
    fits = place < len(lengths)
    expect(fits, "arguments", f"at most {lengths[-1]} in dimension 1", length)
    return place


def pad_to(tensor: Tensor, length: int) -> Tensor:
    """`tensor` with zeros behind, up to `length` in dimension 1; as it is with fewer dimensions."""
    if tensor.dim() < 2:
        return tensor
    more = length - tensor.shape[1]
    behind = [0, 0] * (tensor.dim() - 2)
    return F.pad(tensor, [*behind, 0, more])
