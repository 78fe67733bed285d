"""Forward and backward passes of a module as CUDA graphs, and those of a training step.

A graph replays all launches of a pass by one call. This pays where the CPU launches more slowly
than the GPU computes: LSTMs and small batches. Shapes in a graph are fixed, so arguments are padded
to a multiple of frames or labels, and a shape is captured when it repeats. An earlier form gave the
losses and gradients of the plain passes on an H100. This form has not run on a GPU yet.
"""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from asrkit.cuda_graphs import capture_training
from asrkit.devices import to_device
from asrkit.gpu_waits import CaptureGuard
from asrkit.models.common import strided
from asrkit.models.ctc import EncodingModel
from asrkit.shapes import expect

FRAMES = 64  # feature frames of 10 ms, to a multiple of which a batch is padded
LABELS = 16  # labels, likewise
MOST = 64  # shapes of a module that are captured; later ones run as they are
Arguments = tuple[Tensor, ...]
# capture(module, arguments) -> a callable that replays the module's passes on such arguments
Capture = Callable[[nn.Module, Arguments], Callable[..., Any]]


def graphed_training(module: nn.Module, multiple: int) -> "Graphed":
    """`module` with CUDA graphs of its forward and backward pass, one for each repeated shape.

    The graphs share one memory pool, so a backward pass must follow its forward pass before another
    forward pass begins. Captures leave `module`, its parameters, buffers and gradients, and torch's
    random numbers unchanged, also if they fail. torch's warning about gradients from another stream
    is switched off: gradients of a graph always come from one.

    Args:
        module: A module on a GPU, in training mode, without hooks. Its control flow must be static
            and read nothing from the device. Lengths among its arguments must be on the device, and
            its results for them must not depend on padding in dimension 1.
        multiple: Tensors of two dimensions or more are padded to a multiple of this in dimension 1.

    Returns:
        A callable that takes the module's arguments. Its results may be padded.

    Raises:
        ValueError: The module is not on a GPU.
    """
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    remedy = "Elsewhere call it as it is (asrkit train: without --graphs)."
    expect(on_gpu, "module", "one on a CUDA device", device, remedy)
    pool = torch.cuda.graph_pool_handle()

    def capture(view: nn.Module, arguments: Arguments) -> Callable[..., Any]:
        """Capture both passes of `view` on `arguments`."""
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached cast would be a step old in a replay
        try:
            with torch.random.fork_rng([device]):
                with CaptureGuard():
                    view(*arguments)
                return capture_training(view, arguments, pool)
        finally:
            torch.set_autocast_cache_enabled(caches)

    # a pass captured on another stream stays alive, and torch would warn at each step
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    return Graphed(module, multiple, capture)


class Graphed:
    """A module whose passes are captured at the second call of a shape; see `graphed_training`.

    Args:
        module: Module whose parameters the captured passes use.
        multiple: Tensors are padded to a multiple of this in dimension 1.
        capture: Captures a shallow copy of the module, which shares its parameters and buffers.
    """

    def __init__(self, module: nn.Module, multiple: int, capture: Capture) -> None:
        self.module = module
        self.multiple = multiple
        self.capture = capture
        self.calls = Counter[Any]()
        self.passes = dict[Any, Callable[..., Any]]()
        self.replayed = 0  # calls
        for weight in module.parameters():
            # A graph writes each gradient to the same memory, and torch accumulates in that memory.
            if weight.requires_grad:
                weight.register_hook(torch.clone)

    def __call__(self, *arguments: Tensor) -> Any:
        """Result of the module for `arguments`; padded, where its passes were captured."""
        results = self.replay(*arguments)
        return self.module(*arguments) if results is None else results

    def replay(self, *arguments: Tensor) -> Any:
        """Result for the padded arguments, or None for a shape that is not captured.

        Raises:
            RuntimeError: A pass cannot be captured; the message has its shapes.
        """
        padded = tuple(pad_to(tensor, self.multiple) for tensor in arguments)
        shapes = tuple(tuple(tensor.shape) for tensor in padded)
        self.calls[shapes] += 1
        if shapes not in self.passes:
            if self.calls[shapes] == 1 or len(self.passes) == MOST:
                return None
            self.passes[shapes] = self._captured(tuple(tensor.clone() for tensor in padded))
        self.replayed += 1
        return self.passes[shapes](*padded)

    def _captured(self, arguments: Arguments) -> Callable[..., Any]:
        # a capture runs the module, which updates the running statistics of batch norms
        before = [buffer.clone() for buffer in self.module.buffers()]
        view = copy.copy(self.module)  # a capture replaces the `forward` of its module
        try:
            return self.capture(view, arguments)
        except Exception as error:
            shapes = [tuple(tensor.shape) for tensor in arguments]
            raise RuntimeError(
                f"module: its passes on {shapes} cannot be captured: {error}"
            ) from error
        finally:
            with torch.no_grad():
                for buffer, value in zip(self.module.buffers(), before, strict=True):
                    buffer.copy_(value)


def pad_to(tensor: Tensor, multiple: int) -> Tensor:
    """`tensor`, zero-padded in dimension 1 to a multiple; unchanged below two dimensions."""
    if tensor.dim() < 2:
        return tensor
    later_dims = [0, 0] * (tensor.dim() - 2)
    return F.pad(tensor, [*later_dims, 0, -tensor.shape[1] % multiple])


class StepGraphs:
    """Encoder (with CTC head) and predictor of a model in training, as CUDA graphs.

    `encode` and `rows` replace those of the model. Values and gradients are those of the plain
    passes, up to rounding and the random numbers of dropout. Only the first call of a shape, and
    shapes beyond `MOST`, run without a graph; there an LSTM encoder runs in phases.

    Args:
        model: A transducer or an encoder-decoder model in training mode.
        graphed: Makes a `Graphed` of a module and a multiple.

    Raises:
        ValueError: The model is not on a GPU.
    """

    def __init__(self, model: Any, graphed: Any = graphed_training) -> None:
        self.model = model
        self.encoder = graphed(EncoderPass(model), FRAMES)
        if hasattr(model, "rows"):
            self.predictor = graphed(PredictorPass(model), LABELS)

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Frames, their lengths and CTC's log-probabilities, as `EncodingModel.encode` gives them.

        Args:
            features: (B, T, F).
            lengths: Frames of each utterance (B,), on any device.
        """
        frames = torch.tensor([features.shape[1]], device="cpu")
        moved = [to_device(tensor, features.device) for tensor in (lengths, frames)]
        results = self.encoder.replay(features, *moved)
        if results is None:
            return self.model.encode(features, lengths)
        stride = self.model.config.encoder.subsampling
        encoded, ctc = (result[:, : strided(features.shape[1], stride)] for result in results)
        return encoded, strided(lengths, stride), ctc

    def rows(self, targets: Tensor) -> Tensor:
        """Projected predictions of all lattice rows (B, U1, D).

        Args:
            targets: Labels (B, U), on the model's device.
        """
        rows = self.predictor.replay(targets)
        return self.model.rows(targets) if rows is None else rows[:, : targets.shape[1] + 1]


class EncoderPass(EncodingModel):
    """Encoder, projection and CTC head of a model, for batches padded to a longer T."""

    def __init__(self, model: EncodingModel) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.encoder_projection = model.encoder_projection
        self.ctc_head = model.ctc_head

    def forward(self, features: Tensor, lengths: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Projected frames (B, T', D), and log-probabilities of the CTC head (B, T', V).

        Args:
            features: (B, T, F).
            lengths: Frames of each utterance (B,).
            frames: Frames of the batch before it was padded to T, (1,).
        """
        with BatchFrames(frames, features.shape[1]):
            encoded, _, ctc = self.encode(features, lengths)
        return encoded, ctc


class PredictorPass(nn.Module):
    """`rows` of a transducer as a module, with the weights that it uses."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blank = model.blank
        self.predictor = model.predictor
        self.predictor_projection = model.predictor_projection
        self.rows = type(model).rows

    def forward(self, targets: Tensor) -> Tensor:
        """Projected predictions of all lattice rows (B, U1, D)."""
        return self.rows(self, targets)


class BatchFrames(TorchFunctionMode):
    """Lets batch norms in training ignore the frames by which a batch was padded for its graph.

    Their statistics include the padding of the batch itself, as outside of a graph.

    Args:
        frames: Frames of the batch, (1,), on the device.
        padded: Its frames with the graph's padding.
    """

    def __init__(self, frames: Tensor, padded: int) -> None:
        super().__init__()
        self.frames = frames
        self.padded = padded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and kwargs["training"]:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(self, x: Tensor, *running: Tensor, **options: Any) -> Tensor:
        """F.batch_norm in training of x (B, C, T') over the batch's own frames."""
        B, _, T = x.shape
        own = strided(self.frames, self.padded // T)
        inside = torch.arange(T, device=x.device) < own  # (T',)
        count = B * own
        mean = (x.float() * inside).sum((0, 2)) / count  # (C,)
        centered = x - mean[:, None]
        variance = (centered * inside).square().sum((0, 2)) / count
        with torch.no_grad():
            for average, value in zip(running, (mean, variance * count / (count - 1)), strict=True):
                average.lerp_(value, options["momentum"])
        scale = options["weight"] * (variance + options["eps"]).rsqrt()
        return (centered * scale[:, None] + options["bias"][:, None]).to(x.dtype)
