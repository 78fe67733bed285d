"""Linear layers and convolutions for inference on a CPU, their weights prepacked for oneDNN.

oneDNN would otherwise bring the weights into its layout in every call.
"""

from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.cpu import has_avx512
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)
# Frames for which the layouts of products and of convolutions are chosen. Other numbers of frames
# give the same results, about as fast.
ROWS = 128
FRAMES = 400
# For few frames, padding included, oneDNN may want another layout of a convolution, and then makes
# it slowly in every call: a second for 15 million weights. Without AMX it does so for channels in
# blocks of 48. So small weights are kept in a second layout, and such convolutions of large weights
# compute LEAST_FRAMES at least.
LARGE = 2**20
LEAST_FRAMES = 96
FEW_FRAMES = 80
# Prepacked float32 convolutions are faster without AMX too; without AVX-512 they are slower: see
# `has_avx512`.
Activation = Literal["none", "relu", "swish", "gelu"]  # swish is oneDNN's name of SiLU


class Step(nn.Module):
    """A module that costs little Python to call: it has no hooks.

    Between products of large weights no cache holds Python's data. For one utterance of 10 s, 5 to
    7 % of the encoder's time was Python, most of it in `nn.Module.__call__` and `__getattr__`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value  # found before nn.Module.__getattr__ is called

    def __call__(self, *inputs: Any) -> Any:
        """The result of `forward`."""
        return self.forward(*inputs)


class Prepacked(Step):
    """A layer whose weight has an opaque layout, with an optional activation after it.

    It is for inference: it cannot be saved, copied, moved or trained. Its bias stays a parameter,
    which shows the model's dtype and device.
    """

    weight: Tensor

    def __init__(self, bias: Tensor | None, activation: Activation = "none") -> None:
        super().__init__()
        self.activation = activation
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        expect(
            False,
            "model",
            "layers that are not prepacked",
            "prepacked ones, which cannot be saved",
            "Save, copy, move or cast the model before it is prepacked or optimized.",
        )

    _save_to_state_dict = _refuse
    _apply = _refuse  # .to(), .half(), .cuda() and their like call it
    __getstate__ = _refuse  # copy.deepcopy and pickle call it


class PrepackedLinear(Prepacked):
    """A linear layer with a weight (out, in), a bias and an optional activation."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "none"
    ) -> None:
        super().__init__(bias, activation)
        # torch.compile's freezing calls the same operator.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) from (..., in), in the dtype of the weight."""
        formula = "none" if self.activation == "gelu" else ""  # no approximation
        return torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.activation, [], formula
        )

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """(..., out): the layer, without activation, of x (..., in), plus `residual` (..., out).

        In half precision the sum is rounded once, where a layer and then a sum are rounded twice.
        """
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class PrepackedPointwise(PrepackedLinear):
    """A convolution of one frame, computed as a linear layer with channels last.

    A prepacked convolution of many channels over few frames would be up to a hundred times slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, out, T) from (B, in, T), in the dtype of the weight."""
        rows = x.transpose(1, 2).contiguous()  # (B, T, in)
        return super().forward(rows).transpose(1, 2)


class Window(NamedTuple):
    """How the window of a convolution over images moves."""

    padding: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


def prepack_kernel(weight: Tensor, window: Window, height: int, width: int) -> Tensor:
    """A weight (out, in / groups, ., .) for `convolve`, for images of about `height` x `width`."""
    reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    image = [1, window.groups * weight.shape[1], height, width]
    return reorder(weight.detach().to_mkldnn(), *window, image)


def convolve(
    image: Tensor,
    weight: Tensor,
    window: Window,
    bias: Tensor | None = None,
    activation: Activation = "none",
) -> Tensor:
    """Convolve images (B, C, H, W), channels last in memory, with a weight of `prepack_kernel`."""
    return torch.ops.mkldnn._convolution_pointwise(image, weight, bias, *window, activation, [], "")


class PrepackedDepthwise(Prepacked):
    """A depthwise convolution with a weight (out, 1, height, width) over images, channels last.

    A channel of the input may become several.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation = "none",
        *,
        stride: int = 1,
        groups: int,
    ) -> None:
        super().__init__(bias, activation)
        height, width = weight.shape[2:]
        self.window = Window((height // 2, width // 2), (stride, stride), groups=groups)
        # For images of one row, the layout for more rows takes up to twice the time.
        rows = 1 if height == 1 else ROWS
        self.weight = prepack_kernel(weight, self.window, rows, ROWS)

    def forward(self, image: Tensor) -> Tensor:
        """(B, T', F', C) from (B, T, F, C), in the dtype of the weight."""
        by_channel = image.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        out = convolve(by_channel, self.weight, self.window, self.bias, self.activation)
        return out.permute(0, 2, 3, 1)


def prepack_by_group(weight: Tensor, rows: int) -> Tensor:
    """A weight (G, out, in) for `multiply_by_group`, prepacked for this number of rows.

    With a few rows more or less oneDNN may want another layout, and then makes it in every call:
    that takes 9 ms for 8 groups of 64 columns and 256 outputs, where the product takes 0.5.
    """
    kernels = weight.flatten(0, 1)[..., None, None]  # (G out, in, 1, 1)
    return prepack_kernel(kernels.contiguous(), Window(groups=len(weight)), rows, 1)


def multiply_by_group(rows: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Products of each group of columns with its own weight: (R, G, out) from `rows` (R, G in).

    Computed as a 1x1 convolution over an image one pixel wide, because oneDNN then reads the
    columns in place. For 125 rows, 8 groups of 64 columns and 250 outputs it took half the time of
    a batch of float32 products in torch, and 0.8 of it in bfloat16, on an AMD EPYC with AVX-512.

    Args:
        rows: (R, G in), contiguous.
        weight: The result of `prepack_by_group`.
        groups: Number of groups, G.
    """
    image = rows[None, :, None].permute(0, 3, 1, 2)  # (1, G in, R, 1), channels last
    out = convolve(image, weight, Window(groups=groups))
    return out.permute(0, 2, 3, 1).view(len(rows), groups, -1)


class PrepackedConv1d(Prepacked):
    """A convolution over time, with an optional activation after it.

    Its output has channels last in memory, as the next convolution wants them.
    """

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__(conv.bias)
        (self.stride,) = conv.stride
        (self.padding,) = map(int, conv.padding)
        (dilation,) = conv.dilation
        self.reach = dilation * (conv.kernel_size[0] - 1)
        # oneDNN takes it as a convolution over images one pixel high. The zeros of the padding are
        # appended before: kernels that make them take up to 1.4 times as long.
        self.window = Window((0, 0), (1, self.stride), (1, dilation))
        weight = conv.weight.unsqueeze(2)
        self.weight = prepack_kernel(weight, self.window, 1, FRAMES + self.reach)
        changes_layout = conv.out_channels % 48 == 0 or torch.cpu._is_amx_tile_supported()
        self.least_frames = LEAST_FRAMES if changes_layout else 1
        self.weight_for_few: Tensor | None = None
        if weight.numel() < LARGE:
            few = max(FEW_FRAMES // 2, self.reach + 1)
            self.weight_for_few = prepack_kernel(weight, self.window, 1, few)

    def forward(self, x: Tensor) -> Tensor:
        """(B, out, T') from (B, in, T), in the dtype of the weight."""
        frames = (x.shape[2] + 2 * self.padding - self.reach - 1) // self.stride + 1
        weight, least = self.weight, self.least_frames
        width = frames + self.reach // self.stride
        if width <= FEW_FRAMES and self.weight_for_few is not None:
            weight, least = self.weight_for_few, 1
        end = self.padding + max(least - width, 0) * self.stride
        # Padded as rows of channels, so that channels are last, as the convolution wants them.
        rows = F.pad(x.transpose(1, 2), (0, 0, self.padding, end))  # (B, T, in)
        image = rows.transpose(1, 2).unsqueeze(2).contiguous(memory_format=torch.channels_last)
        out = convolve(image, weight, self.window, self.bias, self.activation)
        return out.squeeze(2)[:, :, :frames]


def onednn_supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies prepacked weights of `dtype` on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer and its weight are torch's own, not those of a quantizer."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def can_prepack(model: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Whether a model is in eval mode, on a CPU, in dtypes that oneDNN multiplies.

    Args:
        model: The model.
        dtype: The dtype that its weights will have; None: those that they have.
    """
    weights = [*model.parameters()]
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    dtypes = {dtype or weight.dtype for weight in weights if weight.is_floating_point()}
    return not model.training and on_cpu and all(map(onednn_supports, dtypes))


def prepack(model: M) -> M:
    """Bring the weights of linear layers and convolutions into oneDNN's layout, in place.

    Every nn.Linear and every nn.Conv1d of one frame becomes a prepacked layer, unless a quantizer
    has replaced it or its weight; with AVX-512 so does nearly every nn.Conv1d of one group. In an
    nn.Sequential a ReLU right after such a layer, or a GELU after a linear one, becomes a part of
    it. Returns the model.

    Args:
        model: A model for which `can_prepack` is True.

    Raises:
        ValueError: `can_prepack` is False for it.
    """
    expect(
        can_prepack(model),
        "model",
        "one in eval mode on a CPU, in a dtype that its oneDNN multiplies",
        type(model).__name__,
    )
    _prepack_children(model)
    return model.eval()


def _prepack_children(parent: nn.Module) -> None:
    """Prepack the layers in `parent`, freeing the old weights of each before the next."""
    for name in [name for name, _ in parent.named_children()]:
        child = getattr(parent, name)
        if is_plain_linear(child):
            setattr(parent, name, PrepackedLinear(child.weight, child.bias))
        elif not _is_plain_convolution(child):
            _prepack_children(child)
        elif child.kernel_size == (1,) and child.stride == (1,) and child.padding == (0,):
            weight = child.weight.squeeze(2).contiguous()
            setattr(parent, name, PrepackedPointwise(weight, child.bias))
        else:
            setattr(parent, name, PrepackedConv1d(child))
    if type(parent) is nn.Sequential:
        _fuse_activations(parent)


def _is_plain_convolution(layer: Any) -> bool:
    """Whether a layer is a convolution over time that can be prepacked, and gains by it.

    It has one group, several inputs and outputs, and zeros as padding if any. With one output some
    of oneDNN's values are wrong: for several utterances of one frame, and kernels such as 29.
    Without AVX-512 only convolutions of one frame are prepacked, as linear layers. For others
    oneDNN wants another layout for some numbers of frames, and makes it in every call: 1.1 s for
    640 channels and 256 frames, where the plain convolution takes 0.1. Other numbers of frames gain
    nothing.

    In half precision oneDNN wants another layout of few channels in blocks of 48 for some numbers
    of frames, and makes it in every call: 20 to 100 times the time of the plain convolution.
    """
    if type(layer) is not nn.Conv1d or isinstance(layer.padding, str):
        return False
    several = min(layer.in_channels, layer.out_channels) > 1
    plain = layer.groups == 1 and several and layer.padding_mode == "zeros"
    wide = layer.weight.dtype == torch.float32 or layer.weight.numel() >= LARGE
    longer = has_avx512() and (wide or layer.out_channels % 48 != 0)
    return plain and (longer or layer.kernel_size == (1,))


def _fuse_activations(layers: nn.Sequential) -> None:
    """Make prepacked layers compute the activations after them."""
    for place in range(1, len(layers)):
        layer: Any = layers[place - 1]
        activation = layers[place]
        relu = isinstance(layer, Prepacked) and isinstance(activation, nn.ReLU)
        gelu = isinstance(layer, PrepackedLinear) and isinstance(activation, nn.GELU)
        if relu or (gelu and activation.approximate == "none"):
            layer.activation = "relu" if relu else "gelu"
            layers[place] = nn.Identity()
