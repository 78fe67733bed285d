"""Linear layers and convolutions for inference on a CPU, their weights laid out for oneDNN once.

Otherwise oneDNN does so in every call.
"""

import math
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
# takes 0.6 to 0.9 times. So float32 has no rule of its own.
Activation = Literal["none", "relu", "swish", "gelu"]  # swish: oneDNN's name of SiLU


class Packed(nn.Module):
    """A layer for inference whose weight has an opaque layout.

    It cannot be saved, copied, moved or trained.
    """

    def _save_to_state_dict(self, *_: Any) -> None:
        self._refuse("cannot be saved", "Save the model before it is packed or optimized.")

    def _apply(self, *_: Any, **__: Any) -> Any:  # .to(), .half(), .cuda() and their like call it
        self._refuse("cannot be moved or cast", "Do that before it is packed or optimized.")

    def __getstate__(self) -> Any:  # copy.deepcopy and pickle call it
        self._refuse("cannot be copied or pickled", "Do that before it is packed or optimized.")

    def _refuse(self, what: str, remedy: str) -> None:
        expect(False, "model", "layers that are not packed", f"packed ones, which {what}", remedy)


class PackedLinear(Packed):
    """A linear layer, and perhaps the activation behind it."""

    def __init__(self, linear: nn.Linear, activation: Activation = "none") -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.activation = activation
        # As torch.compile's freezing does.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias: Tensor | None = None
        if linear.bias is not None:
            self.bias = linear.bias.detach()

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


class PackedDepthwise(Packed):
    """A depthwise convolution whose channels lie last, and perhaps the activation behind it.

    One channel of input may become several. An nn.Conv1d over time is computed as an image one
    pixel high.
    """

    def __init__(self, conv: nn.Conv1d | nn.Conv2d, activation: Activation = "none") -> None:
        super().__init__()
        self.activation = activation
        weight = conv.weight.detach()
        rows = ROWS
        if isinstance(conv, nn.Conv1d):
            weight = weight.unsqueeze(2)
            rows = 1  # the layout for images of more takes up to twice the time
        height, width = weight.shape[2:]
        self.channels = conv.groups
        self.stride = [conv.stride[0]] * 2
        self.padding = [height // 2, width // 2]
        lay_out: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
        self.weight = lay_out(
            weight.to_mkldnn(),
            self.padding,
            self.stride,
            [1, 1],
            self.channels,
            [1, self.channels, rows, ROWS],
        )
        self.bias = _kept(conv.bias)

    def forward(self, image: Tensor) -> Tensor:
        """(B, T', F', C) of (B, T, F, C) in the dtype of the weight."""
        by_channel = image.permute(0, 3, 1, 2)
        out = torch.ops.mkldnn._convolution_pointwise(
            by_channel.contiguous(memory_format=torch.channels_last),
            self.weight,
            self.bias,
            self.padding,
            self.stride,
            [1, 1],
            self.channels,
            self.activation,
            [],
            "",
        )
        return out.permute(0, 2, 3, 1)


def pack_by_group(weight: Tensor) -> Tensor:
    """The weight (G, out, in) of `multiply_by_group`, laid out for oneDNN."""
    G, _, inputs = weight.shape
    kernels = weight.detach().flatten(0, 1)[..., None, None]  # (G out, in, 1, 1)
    lay_out: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    column = [1, G * inputs, ROWS, 1]
    return lay_out(kernels.contiguous().to_mkldnn(), [0, 0], [1, 1], [1, 1], G, column)


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
    out = torch.ops.mkldnn._convolution_pointwise(
        image, weight, None, [0, 0], [1, 1], [1, 1], groups, "none", [], ""
    )
    return out.permute(0, 2, 3, 1)[0, :, 0].unflatten(1, (groups, -1))


class ReadLinear(nn.Linear):
    """A linear layer whose weight is read elsewhere too: packed, it keeps it beside the layout."""

    packed: PackedLinear | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in)."""
        if self.packed is not None:
            return self.packed(x)
        return super().forward(x)


class PackedConv1d(Packed):
    """A convolution over time, and perhaps the activation behind it.

    What it returns has its channels last in memory, where the next one wants them. Its bias stays a
    parameter: who asks a model for the dtype of its parameters finds one.
    """

    def __init__(self, conv: nn.Conv1d, activation: Activation = "none") -> None:
        super().__init__()
        self.activation = activation
        self.stride = [1, *conv.stride]
        self.padding = [0, *(int(frames) for frames in conv.padding)]
        self.dilation = [1, *conv.dilation]
        self.reach = conv.dilation[0] * (conv.kernel_size[0] - 1)
        self.weight = self._laid_out(conv, FRAMES)
        self.weight_for_few: Tensor | None = None
        if conv.weight.numel() < LARGE:
            self.weight_for_few = self._laid_out(conv, FEW_FRAMES // 2)
        changes = conv.out_channels % 48 == 0 or torch.cpu._is_amx_tile_supported()
        self.least_frames = LEAST_FRAMES if changes else 1
        self.bias = _kept(conv.bias)

    def _laid_out(self, conv: nn.Conv1d, frames: int) -> Tensor:
        """The weight in the layout for an input of `frames`."""
        weight = conv.weight.detach().unsqueeze(2)  # images one pixel high
        lay_out: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
        return lay_out(
            weight.to_mkldnn(),
            self.padding,
            self.stride,
            self.dilation,
            1,
            [1, conv.in_channels, 1, frames],
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, out, T') of (B, in, T) in the dtype of the weight."""
        stride = self.stride[1]
        frames = (x.shape[2] + 2 * self.padding[1] - self.reach - 1) // stride + 1
        few = frames <= FEW_FRAMES
        weight = self.weight
        if few and self.weight_for_few is not None:
            weight = self.weight_for_few
        elif not few or frames < self.least_frames:
            x = self._in_whole_blocks(x)
        image = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        out = torch.ops.mkldnn._convolution_pointwise(
            image,
            weight,
            self.bias,
            self.padding,
            self.stride,
            self.dilation,
            1,
            self.activation,
            [],
            "",
        )
        return out.squeeze(2)[:, :, :frames]

    def _in_whole_blocks(self, x: Tensor) -> Tensor:
        """`x` (B, in, T) with zeros behind it, for outputs in whole blocks and enough of them.

        Part of a block costs as much as a block, and for fewer outputs than `least_frames` oneDNN
        may lay the weight out anew. The zeros change no output that is kept: they lie where the
        convolution pads with zeros itself.
        """
        T = x.shape[2]
        block = BLOCK * self.stride[1]  # frames of the input for a block of outputs
        least = self.least_frames // BLOCK
        blocks = max(math.ceil(T / block), least)
        # Padded as rows of channels: channels then lie last, as the convolution wants them.
        rows = F.pad(x.transpose(1, 2), (0, 0, 0, blocks * block - T))
        return rows.transpose(1, 2)


class PackedPointwise(Packed):
    """A convolution of one frame, computed as a linear layer over channels that lie last.

    As a packed convolution of many channels over few frames it is up to a hundred times slower.
    """

    def __init__(self, conv: nn.Conv1d, activation: Activation = "none") -> None:
        super().__init__()
        self.activation = activation
        weight = conv.weight.detach().squeeze(2).contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias = _kept(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, out, T) of (B, in, T) in the dtype of the weight."""
        rows = x.transpose(1, 2).contiguous()  # (B, T, in)
        out = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, self.activation, [], ""
        )
        return out.transpose(1, 2)


def _kept(bias: Tensor | None) -> nn.Parameter | None:
    """A layer's bias as a parameter that does not train; None where it has none."""
    if bias is None:
        return None
    return nn.Parameter(bias.detach(), requires_grad=False)


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
    """Whether a layer is torch's linear one with a plain weight: no quantizer has replaced either.

    Args:
        layer: Any.
    """
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def packs(model: nn.Module) -> bool:
    """Whether `pack` takes the model: in eval mode, on a CPU, in dtypes that oneDNN multiplies."""
    if model.training:
        return False
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        return False
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    return all(multiplies(dtype) for dtype in dtypes)


def pack(model: M) -> M:
    """Lay out the weights of linear layers and convolutions for oneDNN, in place.

    Every nn.Linear, and every nn.Conv1d of one group, becomes a packed layer, where no quantizer
    has replaced it or its weight. A ReLU right behind a convolution, in an nn.Sequential of the
    two, becomes a part of it, and so does a ReLU or GELU behind a linear layer in an nn.Sequential.
    A ReadLinear keeps its weight too. Returns the model.

    Args:
        model: A model for which `packs` is True.

    Raises:
        ValueError: `packs` is False for it.
    """
    wanted = "one in eval mode on a CPU, in a dtype that its oneDNN multiplies"
    expect(packs(model), "model", wanted, type(model).__name__)
    _pack_children(model)
    return model


def _pack_children(parent: nn.Module) -> None:
    """Pack what lies in `parent`; each layer's old weights are freed before the next is packed."""
    for name in [name for name, _ in parent.named_children()]:
        child = getattr(parent, name)
        if isinstance(child, ReadLinear):
            child.packed = PackedLinear(child).eval()
            continue
        packed = _packed(child)
        if packed is None:
            _pack_children(child)
        else:
            setattr(parent, name, packed.eval())
    if type(parent) is nn.Sequential:
        _join_activations(parent)


def _join_activations(layers: nn.Sequential) -> None:
    """Have packed linear layers compute the activations behind them."""
    for place in range(1, len(layers)):
        linear = layers[place - 1]
        activation = _activation(layers[place])
        if isinstance(linear, PackedLinear) and activation != "none":
            linear.activation = activation
            layers[place] = nn.Identity()


def _activation(layer: nn.Module) -> Activation:
    """The activation that a linear layer can compute for `layer`; "none" for any other layer."""
    if type(layer) is nn.ReLU:
        return "relu"
    if type(layer) is nn.GELU and layer.approximate == "none":
        return "gelu"
    return "none"


def _packed(layer: nn.Module) -> nn.Module | None:
    """The packed layer that does what `layer` does; None where there is none."""
    if is_plain_linear(layer):
        return PackedLinear(layer)  # type: ignore[arg-type]
    if type(layer) is nn.Sequential and [type(part) for part in layer] == [nn.Conv1d, nn.ReLU]:
        return _packed_conv(layer[0], "relu")
    if type(layer) is nn.Conv1d:
        return _packed_conv(layer, "none")
    return None


def _packed_conv(conv: Any, activation: Activation) -> nn.Module | None:
    """The packed form of a convolution; None for a depthwise or grouped one, or other padding."""
    depthwise = conv.groups == conv.in_channels
    if depthwise or conv.groups != 1:
        return None
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return None
    one_by_one = conv.kernel_size == (1,) and conv.stride == (1,) and conv.padding == (0,)
    if one_by_one:
        return PackedPointwise(conv, activation)
    return PackedConv1d(conv, activation)
