"""Fast inference: `optimize` computes once what follows from the weights alone.

Beside it: batch norms folded into convolutions, weights in other dtypes, TF32, and CUDA graphs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from asrkit.cpu import OTHER_DTYPES, expect_int8
from asrkit.gpu_waits import CAPTURING
from asrkit.models.attention_decoder import AEDModel
from asrkit.models.encoders import ConvEncoder
from asrkit.models.fastconformer import ConformerBlock, FastConformer
from asrkit.models.int8 import Int8Linear, Int8Output
from asrkit.models.jasper import ConvNorm, Jasper, JasperStage, without_padding
from asrkit.models.packed import PackedLinear, is_plain_linear, pack, packs
from asrkit.models.packed_conformer import PackedFastConformer
from asrkit.models.whisper import WhisperEncoder
from asrkit.shapes import expect, expect_choice

M = TypeVar("M", bound=nn.Module)
LinearLayers = Literal["as_it_is", "int8"]
Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Feature frames that batches are rounded up to, so that few graphs of an encoder serve many
# lengths. 128 of them are 16 encoder frames: rows of attention scores begin at multiples of 32
# bytes in half precision. Of 512 utterances like LibriSpeech's, sorted, in batches of 16, this adds
# 9 % of frames and makes 13 graphs; 512 would add 31 % (35 % where 32 are two batches), for 5.
GRAPH_FRAMES = 128
WARMUP_CALLS = 3  # before a capture: libraries allocate workspaces and choose algorithms


def optimize(model: M, *, linear_layers: LinearLayers = "as_it_is") -> M:
    """Make inference of `model` faster; what it computes is the same but for rounding.

    Batch norms are folded into convolutions, and the branches of a Jasper become one product. On a
    CPU linear layers, the output of an attention decoder too, and with AVX-512 convolutions, are
    packed for oneDNN, and in float32 and bfloat16 a FastConformer becomes one whose activations,
    norms and residuals are parts of its products (`asrkit.models.packed_conformer`). On CUDA,
    `Recognizer` replays an encoder that it optimizes as a CUDA graph for each rounded shape.
    Afterwards the model is for inference on this device, under no_grad, and no weight may change:
    to train, save, move or cast it, optimize another copy instead.

    Args:
        model: A model or an encoder in eval mode, its weights loaded, moved and cast. It is
            changed in place; a bare FastConformer is not to be used afterwards, but for what is
            returned.
        linear_layers: "int8", for a FastConformer in float32 or bfloat16 on a CPU with VNNI or AMX,
            computes the linear layers of its blocks in int8 (`asrkit.models.int8`), which is
            another arithmetic; for a Whisper it computes the output layer in int8, with AVX2 too.
            All else stays in the model's dtype: bfloat16 is the faster one where the CPU has it.

    Returns:
        The model; of a bare FastConformer on a CPU, the packed encoder with its weights.

    Raises:
        ValueError: The model is in training mode, or `linear_layers` does not go with it or with
            this CPU.
    """
    expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    expect(not model.training, "model", "eval mode", "training mode", "Call model.eval() first.")
    expect_choice("linear_layers", linear_layers, ("as_it_is", "int8"))
    encoder: Any = getattr(model, "encoder", model)
    fuses = packs(model) and isinstance(encoder, FastConformer) and _is_plain(encoder)
    is_whisper = isinstance(model, AEDModel) and isinstance(encoder, WhisperEncoder)
    output = Int8Output if linear_layers == "int8" and is_whisper else PackedLinear
    layer: Any = PackedLinear
    if linear_layers == "int8" and is_whisper:
        expect(packs(model), "int8", "a Whisper on a CPU", "another device or dtype", OTHER_DTYPES)
    elif linear_layers == "int8":
        expect_int8()
        wanted = "a FastConformer in float32 or bfloat16 on a CPU"
        weight = next(model.parameters())
        got = f"{type(encoder).__name__} in {weight.dtype} on {weight.device.type}"
        expect(fuses, "int8", wanted, got, OTHER_DTYPES)
        layer = Int8Linear
    fold(model)
    if fuses:
        fused: Any = PackedFastConformer(encoder, layer)
        if encoder is model:
            return fused
        model.encoder = fused
    if not packs(model):
        return model
    if isinstance(model, AEDModel):
        model.packed_output = output(model.embedding.weight, model.output_bias)
    return pack(model)


def _is_plain(encoder: FastConformer) -> bool:
    """Whether all of an encoder is in float32 or bfloat16, no layer replaced by a quantizer."""
    dtypes = {weight.dtype for weight in encoder.parameters()}
    linear = 1 + 9 * len(encoder.blocks)  # of the subsampling, and of a block
    plain = sum(map(is_plain_linear, encoder.modules())) == linear
    return plain and dtypes in ({torch.float32}, {torch.bfloat16})


class FoldedNorm(nn.Module):
    """Stands where a batch norm was that is now part of a convolution: returns what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself; ValueError in training, which needs the statistics of the batch."""
        wanted = "eval mode: its batch norms are folded"
        expect(not self.training, "model", wanted, "training mode", "Load it again to train it.")
        return x


def fold(model: M) -> M:
    """Fold the batch norms of the model's encoder into the convolutions before them, in place.

    In inference a batch norm multiplies and adds the same numbers in every call. The branches of a
    dense stage of a Jasper become one product. What the model computes is the same but for
    rounding. Its state_dict has no batch norms any more: it loads no state_dict of a model that is
    not folded, and cannot be saved as a checkpoint. Folding again changes nothing.

    Args:
        model: A model in eval mode. It is changed, and returned.

    Raises:
        ValueError: The model is in training mode, or batch norms share a convolution. It is then as
            it was.
    """
    remedy = "Call model.eval() first: training needs batch norms."
    expect(not model.training, "model", "eval mode", "training mode", remedy)
    found = [
        (conv, norms, name)
        for part in model.modules()
        for conv, norms, name in _convolutions(part)
        if isinstance(getattr(norms, name), nn.BatchNorm1d)
    ]
    convs = {id(conv) for conv, _, _ in found}
    wanted = "a convolution of its own before each batch norm"
    expect(len(convs) == len(found), "model", wanted, "one that several share")
    for conv, norms, name in found:
        fold_norm(conv, getattr(norms, name))
        setattr(norms, name, FoldedNorm().eval())
    for part in model.modules():
        if isinstance(part, Jasper):
            for number, stage in enumerate(part.stages):
                if isinstance(stage, JasperStage):
                    part.stages[number] = FoldedStage(stage).eval()
    return model


def _convolutions(part: nn.Module) -> Iterator[tuple[Any, nn.Module, str]]:
    """Convolutions of `part`; of the norm behind each, the module that holds it, and its name."""
    if isinstance(part, ConformerBlock):
        yield part.depthwise, part, "batch_norm"
    if isinstance(part, ConvNorm):
        yield part.conv, part, "norm"
    if isinstance(part, ConvEncoder):
        for convs, norms in ((part.strides, part.stride_norms), (part.convs, part.norms)):
            for number, conv in enumerate(convs):
                yield conv, norms, str(number)


@torch.no_grad()
def fold_norm(conv: nn.Conv1d, norm: Any) -> None:
    """Give `conv` the weight and bias by which it equals `conv` and then the batch norm `norm`.

    With scale = gamma / sqrt(variance + eps): weight * scale, and (bias - mean) * scale + beta, in
    float32 at least, then in the dtype of the weight.
    """
    dtype = conv.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    scale = norm.weight.to(wide) / (norm.running_var.to(wide) + norm.eps).sqrt()
    weight = conv.weight.to(wide) * scale[:, None, None]
    bias = -norm.running_mean.to(wide)
    if conv.bias is not None:
        bias = bias + conv.bias.to(wide)
    bias = bias * scale + norm.bias.to(wide)
    conv.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    conv.bias = nn.Parameter(bias.to(dtype), requires_grad=False)


class FoldedStage(nn.Module):
    """A stage of a Jasper for inference, its norms folded.

    The branches' 1x1 convolutions of several inputs are one of their channels side by side.
    """

    def __init__(self, stage: JasperStage) -> None:
        super().__init__()
        convs: list[Any] = [repeat.conv for repeat in stage.repeats]
        *before, self.last = convs
        self.norms = FoldedNorm()
        self.layers = nn.ModuleList(nn.Sequential(conv, nn.ReLU(inplace=True)) for conv in before)
        self.branches: nn.Conv1d | None = None
        if stage.branches:
            branches: list[Any] = [branch.conv for branch in stage.branches]
            self.branches = _side_by_side(branches)

    def forward(self, x: Tensor, sources: Sequence[Tensor], padding: Tensor | None) -> Tensor:
        """As `JasperStage.forward`."""
        x = self.norms(x)
        for layer in self.layers:
            x = without_padding(layer(x), padding)
        x = self.last(x)
        if self.branches is not None:
            x = x.add_(self.branches(_concatenated(sources)))
        return without_padding(x.relu_(), padding)


def _concatenated(sources: Sequence[Tensor]) -> Tensor:
    """Tensors (B, C', T) as one (B, C, T), channels last in memory where those of the first are."""
    if sources[0].stride(1) == 1:
        return torch.cat([source.transpose(1, 2) for source in sources], 2).transpose(1, 2)
    return torch.cat(list(sources), 1)


@torch.no_grad()
def _side_by_side(convs: Sequence[nn.Conv1d]) -> nn.Conv1d:
    """One convolution of concatenated inputs that equals the sum of `convs`, 1x1 with biases."""
    weight = torch.cat([conv.weight for conv in convs], 1)
    biases: list[Any] = [conv.bias for conv in convs]
    bias = torch.stack(biases).sum(0)  # added up in float32 at least
    channels, inputs, _ = weight.shape
    merged = nn.Conv1d(inputs, channels, 1, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    merged.bias = nn.Parameter(bias, requires_grad=False)
    return merged


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Compute float32 products and convolutions on CUDA in TF32, or in float32 throughout.

    Without this, cuDNN's convolutions use TF32. The settings are restored afterwards.

    Args:
        on: whether TF32 is allowed inside the block.
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

    Weights that already have it share their memory with those of `model`.
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


def capture(call: Callable[[], Any], pool: Any = None) -> Callable[[], Any]:
    """`call` as a CUDA graph, captured at the first call after some to warm up.

    Inputs and outputs stay where they are in memory: write new inputs in place before a call.

    Args:
        call: reads tensors that stay where they are; returns tensors.
        pool: memory shared by several graphs; what one returned is overwritten when another runs.
    """
    captured = list[Any]()  # the graph, and what `call` returned while it was captured

    def replay() -> Any:
        if not captured:
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
            captured.extend((graph, result))
        captured[0].replay()
        return captured[1]

    return replay


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
        frames = math.ceil(T / GRAPH_FRAMES) * GRAPH_FRAMES
        if self.most is not None:
            frames = max(T, min(frames, self.most))  # more than `most` the encoder refuses itself
        shape = (B, frames)
        if shape not in self.graphs:
            inputs = features.new_zeros(*shape, F)
            sizes = lengths.clone()
            replay = capture(partial(self.encode, inputs, sizes), self.pool)
            self.graphs[shape] = inputs, sizes, replay
        inputs, sizes, replay = self.graphs[shape]
        inputs[:, :T].copy_(features)
        sizes.copy_(lengths)
        return replay()
