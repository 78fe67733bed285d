"""The small convolutional encoder, and what all encoders ask.

Features (B, T, F) and lengths (B,) in; encoded frames (B, T', D) and their lengths (B,) out.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.devices import readable, to_device
from asrkit.shapes import dims, expect, expect_types, valid_mask


def expect_sizes(config: Any, names: str) -> None:
    """ValueError unless a config's fields have their types, and each of `names` is at least 1."""
    expect_types(config)
    for name in names.split():
        size = getattr(config, name)
        expect(size >= 1, name, "at least 1", size)


def expect_heads(config: Any) -> None:
    """ValueError unless a config's attention heads are of one width."""
    divides = config.width % config.heads == 0
    expect(divides, "heads", f"a divisor of width={config.width}", config.heads)


def expect_batch(features: Tensor, lengths: Tensor, bins: int) -> int:
    """T of features (B, T, bins); ValueError unless they and lengths (B,) are a batch.

    Lengths that Python can read at once have to lie in 0..T.
    """
    B, T, _ = dims(features, "B T F", "features", F=bins)
    dims(lengths, "B", "lengths", B=B)
    shape = tuple(features.shape)
    expect(B > 0 and T > 0, "features", "an utterance and a frame at least", shape)
    counts = lengths.dtype in (torch.int32, torch.int64)
    expect(counts, "lengths", "int32 or int64", lengths.dtype, "Give frames, not shares.")
    if readable(lengths):  # a GPU would have to be waited for
        numbers = lengths.numpy()  # not an op of torch
        low, high = numbers.min(), numbers.max()
        expect(0 <= low <= high <= T, "lengths", f"0 to T={T} frames", f"{low} to {high}")
    return T


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype that a module computes in: that of its first floating-point weight or buffer.

    Each call of an encoder asks this, so it looks at the first alone: a model has one dtype. A
    quantizer may leave numbers of 8 bits, floating-point or not, which do not count, or no weights.
    It is float32 where nothing counts, which is what such layers take and return.
    """
    for weight in chain(module.parameters(), module.buffers()):
        if weight.is_floating_point() and weight.itemsize > 1:
            return weight.dtype
    return torch.float32


def draw(weight: Tensor, deviation: float = 1.0) -> None:
    """Fill a weight with numbers of a normal distribution, unless it is without memory: on the
    device "meta" torch imports its compiler for that, which takes longer than to load a model.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=deviation)


def embedding(V: int, D: int) -> nn.Embedding:
    """A layer as `nn.Embedding` draws it, (V, D)."""
    layer = nn.Embedding.from_pretrained(torch.empty(V, D), freeze=False)
    draw(layer.weight)
    return layer


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """Sizes of a `ConvEncoder`, the encoder that learns most in a minute of CPU time.

    Args:
        bins: Mel bins of the features, F.
        width: Channels, D.
        layers: Dilated residual convolutions behind the strided ones.
        kernel: Frames of each convolution, an odd number.
        subsampling: Frames of features for one encoded frame: 2, 4 or 8.
        dropout: Share of activations dropped in training.
    """

    bins: int = 80
    width: int = 128
    layers: int = 5
    kernel: int = 5
    subsampling: int = 4
    dropout: float = 0.05

    def __post_init__(self) -> None:
        expect_sizes(self, "bins width kernel")
        expect(self.subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", self.subsampling)
        expect(self.kernel % 2 == 1, "kernel", "an odd number of frames", self.kernel)


def strided(frames: Any, stride: int) -> Any:
    """ceil(frames / stride), of a number, a tensor or an array: frames behind a strided layer.

    So many are behind a convolution with "same" padding, and where `stride` frames are stacked.
    """
    return (frames + stride - 1) // stride  # no negative quotient: exported, it would be cut


def padding_mask(lengths: Tensor, T: int, device: torch.device) -> Tensor | None:
    """(B, T) bool on `device`, True in the padding; None where all lengths are known to be T.

    Lengths that Python cannot read at once, such as those on a GPU, are not asked.

    Args:
        lengths: Frames of each utterance (B,).
        T: Frames of the batch.
        device: Of the mask.
    """
    if readable(lengths) and bool((lengths >= T).all()):
        return None
    return to_device(~valid_mask(lengths, T), device)


class ConvEncoder(nn.Module):
    """Strided convolutions, then dilated residual convolutions with batch norm.

    Each encoded frame sees about 1.6 s of audio at the default sizes.
    """

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        D = config.width
        half = config.kernel // 2
        self.config = config
        self.width = D
        self.strides = nn.ModuleList()
        for number in range(config.subsampling.bit_length() - 1):
            channels = D if number else config.bins
            conv = nn.Conv1d(channels, D, config.kernel, stride=2, padding=half, bias=False)
            self.strides.append(conv)
        self.convs = nn.ModuleList()
        for layer in range(config.layers):
            dilation = 1 + layer % 3
            padding = dilation * half
            conv = nn.Conv1d(D, D, config.kernel, dilation=dilation, padding=padding, bias=False)
            self.convs.append(conv)
        self.stride_norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.strides)
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.convs)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch of features; what lies behind an utterance's length has no influence.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64, on the features' device or the host.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,), where `lengths` lie.
        """
        T = expect_batch(features, lengths, self.config.bins)
        padding = to_device(~valid_mask(lengths, T), features.device)
        x = features.masked_fill(padding[..., None], 0.0)
        x = x.transpose(1, 2).to(dtype_of(self))  # (B, F, T)
        for conv, norm in zip(self.strides, self.stride_norms, strict=True):
            x = norm(conv(x)).relu()  # (B, D, T / 2)
            lengths = strided(lengths, 2)
            # The padding must not leak into the next convolution's window.
            valid = to_device(valid_mask(lengths, x.shape[2]), x.device)[:, None]  # (B, 1, T')
            x = x * valid
        for conv, norm in zip(self.convs, self.norms, strict=True):
            residual = norm(conv(x)).relu()
            x = (x + self.dropout(residual)) * valid
        return x.transpose(1, 2), lengths
