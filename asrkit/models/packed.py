"""Linear layers and convolutions for inference on a CPU, their weights laid out for oneDNN once.

Otherwise oneDNN does so in every call.
"""

import math
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.cpu import has_avx512
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)
# Frames of the products that the layout is chosen for; others are as right, and about as fast.
ROWS = 128
FRAMES = 400  # those of convolutions
# For few frames oneDNN may want another layout of a convolution, and makes it in every call by its
# slowest way: a second for 15 million weights. Without AMX it does so for channels in blocks of 48.
# So small weights are kept in a second layout, and such convolutions of large weights return
# LEAST_FRAMES at least. Many frames that do not fill a block cost as much as a block.
LARGE = 2**20
LEAST_FRAMES = 112
FEW_FRAMES = 80
BLOCK = 16
# Packed float32 convolutions pay without AMX too. On one thread of an AMD EPYC with AVX-512, packed
# over eager CPU time of the layers of Jasper 10x5 DR, from 256 channels and 11 taps to 768 and 25:
# 0.78 to 0.94 for 100 frames, 0.78 to 0.97 for 350, 0.88 to 0.95 for 800. Only 768 channels of
# fewer than 80 frames take longer, 1.5 times, for LEAST_FRAMES; the whole model of such lengths
# takes 0.6 to 0.9 times. They do not pay without AVX-512: see `has_avx512`.
Activation = Literal["none", "relu", "swish", "gelu"]  # swish: oneDNN's name of SiLU


class Packed(nn.Module):
    """A layer whose weight has an opaque layout, and perhaps the activation behind it.

    It is for inference: it cannot be saved, copied, moved or trained. Its bias stays a parameter:
    who asks a model for the dtype of its parameters finds one.
    """

    weight: Tensor

    def __init__(self, bias: Tensor | None, activation: Activation = "none") -> None:
        super().__init__()
        self.activation = activation
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        remedy = "Save, copy, move or cast the model before it is packed or optimized."
        got = "packed ones, which cannot be saved"
        expect(False, "model", "layers that are not packed", got, remedy)

    _save_to_state_dict = _refuse
    _apply = _refuse  # .to(), .half(), .cuda() and their like call it
    __getstate__ = _refuse  # copy.deepcopy and pickle call it


class PackedLinear(Packed):
    """A linear layer with a weight (out, in), a bias and perhaps an activation."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "none"
    ) -> None:
        super().__init__(bias, activation)
        # As torch.compile's freezing does.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in) in the dtype of the weight."""
        formula = "none" if self.activation == "gelu" else ""  # no approximation
        return torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.activation, [], formula
        )

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """(..., out): the layer, without activation, of x (..., in), plus `residual` (..., out).

        In half precision the sum is rounded once, where a layer and then a sum are rounded twice.
        """
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class PackedPointwise(PackedLinear):
    """A convolution of one frame, computed as a linear layer over channels that lie last.

    As a packed convolution of many channels over few frames it is up to a hundred times slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, out, T) of (B, in, T) in the dtype of the weight."""
        rows = x.transpose(1, 2).contiguous()  # (B, T, in)
        return super().forward(rows).transpose(1, 2)


class Window(NamedTuple):
    """How the window of a convolution over images moves."""

    padding: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


def lay_out(weight: Tensor, window: Window, height: int, width: int) -> Tensor:
    """The weight (out, in / groups, ., .) of `convolve`, for images of about `height` x `width`."""
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
    """A convolution of images (B, C, H, W), channels last in memory, by a weight of `lay_out`."""
    return torch.ops.mkldnn._convolution_pointwise(image, weight, bias, *window, activation, [], "")


class PackedDepthwise(Packed):
    """A depthwise convolution of a weight (out, 1, height, width) over images, channels last.

    One channel of input may become several.
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
        # the layout for images of more rows takes up to twice the time for those of one
        rows = 1 if height == 1 else ROWS
        self.weight = lay_out(weight, self.window, rows, ROWS)

    def forward(self, image: Tensor) -> Tensor:
        """(B, T', F', C) of (B, T, F, C) in the dtype of the weight."""
        by_channel = image.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        out = convolve(by_channel, self.weight, self.window, self.bias, self.activation)
        return out.permute(0, 2, 3, 1)


def pack_by_group(weight: Tensor, rows: int) -> Tensor:
    """The weight (G, out, in) of `multiply_by_group`, laid out for products with so many rows.

    With few rows more or less oneDNN may want another layout, and makes it in every call: that
    takes 9 ms for 8 groups of 64 columns and 256 outputs, where the product takes 0.5.
    """
    kernels = weight.flatten(0, 1)[..., None, None]  # (G out, in, 1, 1)
    return lay_out(kernels.contiguous(), Window(groups=len(weight)), rows, 1)


def multiply_by_group(rows: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Products of each group of columns with its own weight: (R, G, out) of `rows` (R, G in).

    As a convolution of one pixel over an image one pixel wide, because oneDNN then reads columns
    where they lie. For 125 rows, 8 groups of 64 columns and 250 outputs that took half the time of
    a batch of float32 products in torch, and 0.8 of it in bfloat16, on an AMD EPYC with AVX-512.

    Args:
        rows: (R, G in), contiguous.
        weight: Of `pack_by_group`.
        groups: G.
    """
    image = rows[None, :, None].permute(0, 3, 1, 2)  # (1, G in, R, 1), channels last
    out = convolve(image, weight, Window(groups=groups))
    return out.permute(0, 2, 3, 1)[0, :, 0].unflatten(1, (groups, -1))


class PackedConv1d(Packed):
    """A convolution over time, and perhaps the activation behind it.

    What it returns has its channels last in memory, where the next one wants them.
    """

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__(conv.bias)
        (self.stride,) = conv.stride
        (self.padding,) = map(int, conv.padding)
        (dilation,) = conv.dilation
        self.reach = dilation * (conv.kernel_size[0] - 1)
        # over images one pixel high
        self.window = Window((0, self.padding), (1, self.stride), (1, dilation))
        weight = conv.weight.unsqueeze(2)
        self.weight = lay_out(weight, self.window, 1, FRAMES)
        wants_another = conv.out_channels % 48 == 0 or torch.cpu._is_amx_tile_supported()
        self.least_frames = LEAST_FRAMES if wants_another else 1
        self.weight_for_few: Tensor | None = None
        if weight.numel() < LARGE:
            self.weight_for_few = lay_out(weight, self.window, 1, FEW_FRAMES // 2)
        elif not wants_another:
            self.weight_for_few = self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(B, out, T') of (B, in, T) in the dtype of the weight."""
        frames = (x.shape[2] + 2 * self.padding - self.reach - 1) // self.stride + 1
        weight = self.weight
        if frames <= FEW_FRAMES and self.weight_for_few is not None:
            weight = self.weight_for_few
        else:
            x = self._in_whole_blocks(x)
        image = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        out = convolve(image, weight, self.window, self.bias, self.activation)
        return out.squeeze(2)[:, :, :frames]

    def _in_whole_blocks(self, x: Tensor) -> Tensor:
        """`x` (B, in, T) with zeros behind it, for outputs in whole blocks and enough of them.

        The zeros change no output that is kept: they lie where the convolution pads with zeros
        itself.
        """
        T = x.shape[2]
        block = BLOCK * self.stride  # frames of the input for a block of outputs
        blocks = max(math.ceil(T / block), self.least_frames // BLOCK)
        # Padded as rows of channels: channels then lie last, as the convolution wants them.
        rows = F.pad(x.transpose(1, 2), (0, 0, 0, blocks * block - T))
        return rows.transpose(1, 2)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN multiplies packed weights of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer is torch's linear one and so is its weight, not a quantizer's."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def packs(model: nn.Module) -> bool:
    """Whether `pack` takes the model: in eval mode, on a CPU, in dtypes that oneDNN multiplies."""
    weights = [*model.parameters()]
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    return not model.training and on_cpu and all(map(multiplies, dtypes))


def pack(model: M) -> M:
    """Lay out the weights of linear layers and convolutions for oneDNN, in place.

    Every nn.Linear and every nn.Conv1d of one frame becomes a packed layer, where no quantizer has
    replaced it or its weight; with AVX-512 nearly every nn.Conv1d of one group does. A ReLU right
    behind it in an nn.Sequential, and a GELU behind a linear layer, becomes a part of it. Returns
    the model.

    Args:
        model: A model for which `packs` is True.

    Raises:
        ValueError: `packs` is False for it.
    """
    wanted = "one in eval mode on a CPU, in a dtype that its oneDNN multiplies"
    expect(packs(model), "model", wanted, type(model).__name__)
    _pack_children(model)
    return model.eval()


def _pack_children(parent: nn.Module) -> None:
    """Pack what lies in `parent`; each layer's old weights are freed before the next is packed."""
    for name in [name for name, _ in parent.named_children()]:
        child = getattr(parent, name)
        if is_plain_linear(child):
            setattr(parent, name, PackedLinear(child.weight, child.bias))
        elif not _is_plain_convolution(child):
            _pack_children(child)
        elif child.kernel_size == (1,) and child.stride == (1,) and child.padding == (0,):
            weight = child.weight.squeeze(2).contiguous()
            setattr(parent, name, PackedPointwise(weight, child.bias))
        else:
            setattr(parent, name, PackedConv1d(child))
    if type(parent) is nn.Sequential:
        _join_activations(parent)


def _is_plain_convolution(layer: Any) -> bool:
    """Whether a layer is a convolution over time that can be packed: of one group, padded with
    zeros if at all.

    Without AVX-512 only those of one frame are packed, as linear layers: oneDNN wants another
    layout of the others for some numbers of frames, and makes it in every call: 1.1 s for 640
    channels and 256 frames, where not to pack takes 0.1. Other numbers gain nothing.

    In half precision oneDNN wants another layout of few channels in blocks of 48 for some numbers
    of frames, and makes it in every call: that takes 20 to 100 times as long as not to pack.
    """
    if type(layer) is not nn.Conv1d or isinstance(layer.padding, str):
        return False
    plain = layer.groups == 1 and layer.in_channels > 1 and layer.padding_mode == "zeros"
    wide = layer.weight.dtype == torch.float32 or layer.weight.numel() >= LARGE
    longer = has_avx512() and (wide or layer.out_channels % 48 != 0)
    return plain and (longer or layer.kernel_size == (1,))


def _join_activations(layers: nn.Sequential) -> None:
    """Have packed layers compute the activations behind them."""
    for place in range(1, len(layers)):
        layer = layers[place - 1]
        behind = layers[place]
        if isinstance(layer, Packed) and isinstance(behind, nn.ReLU):
            layer.activation = "relu"
        elif isinstance(layer, PackedLinear) and isinstance(behind, nn.GELU):
            if behind.approximate != "none":
                continue
            layer.activation = "gelu"
        else:
            continue
        layers[place] = nn.Identity()
