"""The small convolutional encoder.

Features (B, T, F) and lengths (B,) in; encoded frames (B, T', D) and their lengths (B,) out.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from asrkit.devices import to_device
from asrkit.models.common import Encoded, dtype_of, expect_batch, expect_sizes, strided
from asrkit.shapes import expect, valid_mask


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """Sizes of a `ConvEncoder`, the encoder that learns most in a minute of CPU time.

    Args:
        bins: Mel bins of the features, F.
        width: Channels, D.
        layers: Dilated residual convolutions after the strided ones.
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
        inputs = config.bins
        for _ in range(config.subsampling.bit_length() - 1):
            conv = nn.Conv1d(inputs, D, config.kernel, stride=2, padding=half, bias=False)
            self.strides.append(conv)
            inputs = D
        self.convs = nn.ModuleList()
        for layer in range(config.layers):
            dilation = 1 + layer % 3
            padding = dilation * half
            conv = nn.Conv1d(D, D, config.kernel, dilation=dilation, padding=padding, bias=False)
            self.convs.append(conv)
        self.stride_norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.strides)
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.convs)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> Encoded:
        """Encode a batch of features. What is in the padding has no influence.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64, on the features' device or the host.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,), on the device of `lengths`.
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
