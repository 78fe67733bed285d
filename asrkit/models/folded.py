"""Batch norms folded into the convolutions before them.

In inference a batch norm multiplies and adds the same numbers in every call.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asrkit.models.encoders import ConvEncoder
from asrkit.models.fastconformer import ConformerBlock
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)


class FoldedNorm(nn.Module):
    """Stands where a batch norm was that is now part of a convolution: returns what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself; ValueError in training, which needs the statistics of the batch."""
        wanted = "eval mode: its batch norms are folded"
        remedy = "Load it again to train it."
        expect(not self.training, "model", wanted, "training mode", remedy)
        return x


def fold(model: M) -> M:
    """Fold the batch norms of the model's encoder into the convolutions before them, in place.

    What the model computes is the same but for rounding. Its state_dict has no batch norms any
    more: it loads no state_dict of a model that is not folded, and cannot be saved as a checkpoint.
    Folding again changes nothing.

    Args:
        model: A model in eval mode. It is changed, and returned.

    Raises:
        ValueError: The model is in training mode.
    """
    remedy = "Call model.eval() first: training needs batch norms."
    expect(not model.training, "model", "eval mode", "training mode", remedy)
    for part in list(model.modules()):
        for conv, norms, name in _convolutions(part):
            norm = getattr(norms, name)
            if isinstance(norm, nn.BatchNorm1d):
                dtype = conv.weight.dtype
                weight, bias = fold_norm(conv, norm)
                conv.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
                conv.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
                setattr(norms, name, FoldedNorm().eval())
    return model


@torch.no_grad()
def fold_norm(conv: nn.Conv1d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias, in float32 at least, of one convolution that equals `conv` and then `norm`.

    With scale = gamma / sqrt(variance + eps): weight * scale, and (bias - mean) * scale + beta.

    Args:
        conv: The convolution.
        norm: The batch norm behind it, or the `FoldedNorm` that stands in its place.
    """
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    weight = conv.weight.detach().to(wide)
    if conv.bias is None:
        bias = weight.new_zeros(len(weight))
    else:
        bias = conv.bias.detach().to(wide)
    if not isinstance(norm, nn.BatchNorm1d):
        return weight, bias
    statistics: Any = norm
    mean = statistics.running_mean.to(wide)
    variance = statistics.running_var.to(wide)
    gamma = norm.weight.to(wide)
    beta = norm.bias.to(wide)
    scale = gamma / (variance + norm.eps).sqrt()
    weight = weight * scale[:, None, None]
    bias = (bias - mean) * scale + beta
    return weight, bias


def _convolutions(part: nn.Module) -> Iterator[tuple[Any, nn.Module, str]]:
    """Convolutions of `part`; of the norm behind each, the module that holds it, and its name."""
    if isinstance(part, ConformerBlock):
        yield part.depthwise, part, "batch_norm"
    if isinstance(part, ConvEncoder):
        for number, conv in enumerate(part.strides):
            yield conv, part.stride_norms, str(number)
        for number, conv in enumerate(part.convs):
            yield conv, part.norms, str(number)
