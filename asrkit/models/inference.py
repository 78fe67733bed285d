"""Fast inference: `optimize` computes once what follows from the weights alone.

Also here: weights in other dtypes, TF32, and CUDA graphs of encoders.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from asrkit.cpu import OTHER_DTYPES, expect_int8
from asrkit.cuda_graphs import capture
from asrkit.models.attention_decoder import AEDModel
from asrkit.models.common import own_weights
from asrkit.models.cpu.fused_conformer import FusedFastConformer
from asrkit.models.cpu.int8 import Int8Linear, Int8Output
from asrkit.models.cpu.prepacked import PrepackedLinear, can_prepack, is_plain_linear, prepack
from asrkit.models.fastconformer import FastConformer
from asrkit.models.folding import fold
from asrkit.models.whisper import WhisperEncoder
from asrkit.shapes import expect, expect_choice

M = TypeVar("M", bound=nn.Module)
LinearLayers = Literal["as_it_is", "int8"]
Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Batches are rounded up to a multiple of this many feature frames, so that few graphs of an encoder
# serve many lengths. 128 of them are 16 encoder frames, so rows of attention scores begin at
# multiples of 32 bytes in half precision. For 512 utterances like LibriSpeech's, sorted, in batches
# of 16, 128 adds 9 % of frames and needs 13 graphs; 512 would add 31 % and need 5.
GRAPH_FRAMES = 128


def optimize(
    model: M, *, linear_layers: LinearLayers = "as_it_is", dtype: torch.dtype | None = None
) -> M:
    """Make inference of `model` faster. The model computes the same but for rounding.

    Batch norms are folded into convolutions, and the branches of a Jasper become one product. On a
    CPU the weights of linear layers (the output of an attention decoder too) and, with AVX-512, of
    convolutions are prepacked for oneDNN. In float32 and bfloat16 a FastConformer becomes a fused
    one, whose products compute activations, norms and residuals as well
    (`asrkit.models.cpu.fused_conformer`). On CUDA, `Recognizer` replays an encoder that it
    optimizes as a CUDA graph for each rounded shape. Afterwards the model is for inference on this
    device, under no_grad, and no weight may change: to train, save, move or cast it, optimize
    another copy instead.

    Args:
        model: A model or an encoder in eval mode, its weights loaded, moved and cast. It is changed
            in place. Do not use a bare FastConformer afterwards: use the encoder that is returned.
        linear_layers: "int8" is another arithmetic, for an x86 CPU with AVX2. A FastConformer in
            float32 or bfloat16 then computes the linear layers of its blocks in int8
            (`asrkit.models.cpu.int8`), a Whisper its output layer. The rest stays in the model's
            dtype: bfloat16 is the faster one where the CPU has it.
        dtype: Dtype of the weights afterwards; None: that of the model. With it, a model whose
            weights are in its file (`load_checkpoint(path, dtype=None)`) is read from there, and
            those of a FastConformer's blocks one by one.

    Returns:
        The model; for a bare FastConformer on a CPU, the fused encoder with its weights.

    Raises:
        ValueError: The model is in training mode, `dtype` is not floating-point, or the model or
            this CPU does not support `linear_layers`.
    """
    expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    expect(not model.training, "model", "eval mode", "training mode", "Call model.eval() first.")
    expect_choice("linear_layers", linear_layers, ("as_it_is", "int8"))
    is_float = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    remedy = "For int8 pass linear_layers='int8'."
    expect(is_float, "dtype", "a floating-point dtype, or None", repr(dtype), remedy)
    encoder: Any = getattr(model, "encoder", model)
    prepacks = can_prepack(model, dtype)
    fuses = prepacks and isinstance(encoder, FastConformer) and _is_plain(encoder, dtype)
    weight = next(model.parameters())
    layer: Any = PrepackedLinear
    output: Any = PrepackedLinear
    if linear_layers == "int8":
        expect_int8()
        is_whisper = isinstance(model, AEDModel) and isinstance(encoder, WhisperEncoder)
        expect(
            fuses or (prepacks and is_whisper),
            "int8",
            "a FastConformer in float32 or bfloat16 or a Whisper, on a CPU",
            f"{type(encoder).__name__} in {dtype or weight.dtype} on {weight.device.type}",
            OTHER_DTYPES,
        )
        layer = Int8Linear
        output = Int8Output if is_whisper else PrepackedLinear
    if dtype:
        linear = filter(is_plain_linear, encoder.blocks.modules()) if fuses else ()
        own_weights(model, dtype, weight.device, later={id(layer.weight) for layer in linear})
    fold(model)
    if fuses:
        fused: Any = FusedFastConformer(encoder, layer)
        if encoder is model:
            return fused
        model.encoder = fused
    if not prepacks:
        return model
    if isinstance(model, AEDModel):
        model.prepacked_output = output(model.embedding.weight, model.output_bias)
    return prepack(model)


def _is_plain(encoder: FastConformer, dtype: torch.dtype | None) -> bool:
    """Whether an encoder is, or will be, in float32 or bfloat16 without layers of a quantizer."""
    dtypes = {dtype or weight.dtype for weight in encoder.parameters()}
    layers = 1 + 9 * len(encoder.blocks)  # one of the subsampling, nine of each block
    plain = sum(map(is_plain_linear, encoder.modules())) == layers
    return plain and dtypes in ({torch.float32}, {torch.bfloat16})


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Compute float32 products and convolutions on CUDA in TF32, or in float32 throughout.

    Without this, cuDNN's convolutions use TF32. The settings are restored afterwards.

    Args:
        on: Whether TF32 is allowed inside the block.
    """
    products: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    settings = (products, cudnn.conv, cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32" if on else "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def cast_copy(model: M, dtype: torch.dtype) -> M:
    """A copy of `model` whose floating-point weights have `dtype`.

    Weights that have this dtype already share their memory with those of `model`.
    """
    copies = dict[int, Any]()
    for weight in [*model.parameters(), *model.buffers()]:
        plain = weight.detach()
        if plain.is_floating_point():
            plain = plain.to(dtype)
        if isinstance(weight, nn.Parameter):
            plain = nn.Parameter(plain, weight.requires_grad)
        copies[id(weight)] = plain
    return deepcopy(model, copies)


class EncoderGraphs:
    """An encoder replayed as CUDA graphs, one for each batch size and rounded number of frames.

    The next call overwrites the tensors that a call returned; so does a call of another encoder
    with the same `pool`.

    Args:
        encode: (features (B, T, F), lengths (B,)) to (encoded, lengths). What is in the padding
            must not matter.
        pool: Memory shared with other graphs, or None.
        most: Largest number of feature frames that the encoder takes; None for any number.
    """

    def __init__(self, encode: Encode, pool: Any = None, most: int | None = None) -> None:
        self.encode = encode
        self.pool = pool
        self.most = most
        self.graphs: dict[tuple[int, int], tuple[Any, ...]] = {}

    def __call__(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What `encode` returns for the features padded to a multiple of GRAPH_FRAMES."""
        B, T, F = features.shape
        frames = math.ceil(T / GRAPH_FRAMES) * GRAPH_FRAMES
        if self.most is not None:
            frames = max(T, min(frames, self.most))  # the encoder itself refuses more than `most`
        shape = (B, frames)
        if shape not in self.graphs:
            inputs = features.new_zeros(*shape, F)
            sizes = lengths.clone()
            captured = capture(partial(self.encode, inputs, sizes), pool=self.pool)
            self.graphs[shape] = inputs, sizes, *captured
        inputs, sizes, graph, results = self.graphs[shape]
        inputs[:, :T].copy_(features)
        sizes.copy_(lengths)
        graph.replay()
        return results
