"""Batch norms folded into the convolutions before them: in inference they multiply and add the same
numbers every time.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asrkit.models.encoders import ConvEncoder
from asrkit.models.fastconformer import ConformerBlock
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)


class Folded(nn.Module):
    """Stands where a batch norm was that is now part of the convolution before it: hands on what it
    gets, in eval mode only.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself; ValueError in training, for which the statistics of the batch would be
        needed.
        """
        expect(
            not self.training,
            "model",
            "eval mode: its batch norms are folded",
            "training mode",
            "Load it again to train it.",
        )
        return x


def fold(model: M) -> M:
    """`model` itself, each batch norm of its encoder part of the convolution before it; ValueError
    in training mode.

    What it computes is the same but for rounding. Its state_dict has no batch norms any more: it
    loads no state_dict of a model that is not folded, and cannot be saved as a checkpoint. Folding
    again changes nothing.
    """
    expect(
        not model.training,
        "model",
        "eval mode",
        "training mode",
        "Call model.eval() first: training needs batch norms.",
    )
    for part in [*model.modules()]:
        for conv, norms, name in _pairs(part):
            norm = getattr(norms, name)
            if isinstance(norm, nn.BatchNorm1d):
                weight, bias = folded(conv, norm)
                conv.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=False)
                conv.bias = nn.Parameter(bias.to(conv.weight.dtype), requires_grad=False)
                setattr(norms, name, Folded().eval())
    return model


@torch.no_grad()
def folded(conv: nn.Conv1d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that equals `conv` and then `norm`, which may be folded;
    float32 at least.

    With scale = gamma / sqrt(variance + eps): weight * scale, and (bias - mean) * scale + beta.
    """
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    weight = conv.weight.detach().to(wide)
    bias = weight.new_zeros(len(weight)) if conv.bias is None else conv.bias.detach().to(wide)
    if not isinstance(norm, nn.BatchNorm1d):
        return weight, bias
    scale = norm.weight.to(wide) / (norm.running_var.to(wide) + norm.eps).sqrt()  # type: ignore[union-attr]
    centred = bias - norm.running_mean.to(wide)  # type: ignore[union-attr]
    return weight * scale[:, None, None], centred * scale + norm.bias.to(wide)


def _pairs(part: nn.Module) -> Iterator[tuple[Any, nn.Module, str]]:
    """Convolutions of `part`, the module that holds the norm behind each, and its name there."""
    if isinstance(part, ConformerBlock):
        yield part.depthwise, part, "batch_norm"
    if isinstance(part, ConvEncoder):
        for convs, norms in ((part.strides, part.stride_norms), (part.convs, part.norms)):
            for number, conv in enumerate(convs):
                yield conv, norms, str(number)
