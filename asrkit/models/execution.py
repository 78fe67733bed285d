"""How a model in inference is executed: TF32, other dtypes and layouts of its weights, compiled
encoders, and CUDA graphs of an encoder.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from asrkit.models.inference import compile_encoder, optimize
from asrkit.models.packed import pack
from asrkit.runtime import CAPTURING

M = TypeVar("M", bound=nn.Module)
EncoderForm = Literal["eager", "packed", "optimized", "compiled", "int8"]
Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Feature frames that batches are rounded up to, so that few graphs of an encoder serve many
# lengths. 128 of them are 16 encoder frames: rows of attention scores begin at multiples of 32
# bytes in half precision. Of 512 utterances like LibriSpeech's, sorted, in batches of 16, this adds
# 9 % of frames and makes 13 graphs; 512 would add 31 % (35 % where 32 are two batches), for 5.
GRAPH_FRAMES = 128
WARMUP_CALLS = 3  # before a capture: libraries allocate workspaces and choose algorithms


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Compute float32 products and convolutions on CUDA in TF32, or in float32 throughout.

    Without this, cuDNN's convolutions use TF32. The settings are restored afterwards.

    Args:
        on: whether TF32 is allowed inside the block.
    """
    name, settings = _tf32_settings()
    value: bool | str = on
    if name == "fp32_precision":
        value = "tf32" if on else "ieee"
    before = [getattr(setting, name) for setting in settings]
    try:
        for setting in settings:
            setattr(setting, name, value)
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setattr(setting, name, value)


def _tf32_settings() -> tuple[str, tuple[Any, ...]]:
    """The attribute that holds torch's choice, and the objects that have it.

    Both ways of torch to set it are not to be mixed: once `fp32_precision` was used, asking for
    `allow_tf32` raises.
    """
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        for setting in (cuda, cudnn):
            _ = setting.allow_tf32
    except RuntimeError:
        return "fp32_precision", (cuda, cudnn.conv)
    return "allow_tf32", (cuda, cudnn)


def cast_copy(model: M, dtype: torch.dtype) -> M:
    """A copy of `model` whose floating-point weights have `dtype`.

    Weights that already have it share their memory with those of `model`.
    """
    weights: dict[int, Any] = {
        id(weight): nn.Parameter(_cast(weight, dtype), weight.requires_grad)
        for weight in model.parameters()
    }
    buffers = {id(buffer): _cast(buffer, dtype) for buffer in model.buffers()}
    return deepcopy(model, weights | buffers)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` without its graph, in `dtype` if it holds floating-point numbers."""
    plain = tensor.detach()
    if plain.is_floating_point():
        return plain.to(dtype)
    return plain


def prepare(model: M, form: EncoderForm) -> M:
    """`model` in eval mode, made ready in place for inference.

    Args:
        model: a whole model or an encoder.
        form: "eager" as it is, "packed" by asrkit.models.packed, "optimized" by
            asrkit.models.optimize, "int8" by it with linear layers in int8, "compiled" with
            torch.compile: see `compile_encoder`.

    Returns:
        The model to call: `model` itself, except that a FastConformer optimized on a CPU is a new
        module.

    Raises:
        ValueError: the model trains, or has an encoder that `form` is not for.
    """
    if form == "packed":
        return pack(model)
    if form == "optimized":
        return optimize(model)
    if form == "int8":
        return optimize(model, linear_layers="int8")
    if form == "compiled":
        compile_encoder(getattr(model, "encoder", model))
    return model


def capture(call: Callable[[], Any], pool: Any = None) -> Callable[[], Any]:
    """`call` as a CUDA graph, captured at the first call after some to warm up.

    Inputs and outputs stay where they are in memory: write new inputs in place before a call.

    Args:
        call: reads tensors that stay where they are; returns tensors.
        pool: memory shared by several graphs; what one returned is overwritten when another runs.
    """
    captured = list[Any]()

    def replay() -> Any:
        if not captured:
            captured.extend(_captured(call, pool))
        captured[0].replay()
        return captured[1]

    return replay


def _captured(call: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of `call`, and what it returned while it was captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread may load audio meanwhile
    with CAPTURING, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()
    return graph, result


class EncoderGraphs:
    """An encoder replayed as CUDA graphs, one for each batch size and rounded number of frames.

    What a call returns is overwritten by the next call, also by that of another encoder with the
    same `pool`.

    Args:
        encode: (features (B, T, F), lengths (B,)) to (encoded, lengths); blind to padding.
        pool: memory shared with other graphs, or None.
        most: feature frames that the encoder takes at most; None for any number.
    """

    def __init__(self, encode: Encode, pool: Any = None, most: int | None = None) -> None:
        self.encode = encode
        self.pool = pool
        self.most = most
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Callable[[], Any]]] = {}

    def __call__(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What `encode` returns for the features padded to a multiple of GRAPH_FRAMES."""
        B, T, F = features.shape
        shape = (B, rounded(T, self.most))
        if shape not in self.graphs:
            inputs = features.new_zeros(*shape, F)
            sizes = lengths.clone()
            self.graphs[shape] = (
                inputs,
                sizes,
                capture(partial(self.encode, inputs, sizes), self.pool),
            )
        inputs, sizes, replay = self.graphs[shape]
        inputs[:, :T].copy_(features)
        sizes.copy_(lengths)
        return replay()


def rounded(T: int, most: int | None = None) -> int:
    """Feature frames in the graph that serves T of them: a multiple of GRAPH_FRAMES, or `most`."""
    frames = -(-T // GRAPH_FRAMES) * GRAPH_FRAMES
    if most is None or most < T:  # more than that the encoder refuses itself
        return frames
    return min(frames, most)
