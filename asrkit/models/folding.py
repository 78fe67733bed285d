"""`fold`: batch norms of an encoder become part of the convolutions before them, for inference."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asrkit.models.conv import ConvEncoder
from asrkit.models.fastconformer import ConformerBlock
from asrkit.models.jasper import ConvNorm, Jasper, JasperStage, without_padding
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)


def fold(model: M) -> M:
    """Fold the batch norms of the model's encoder into the convolutions before them, in place.

    In inference a batch norm multiplies and adds the same numbers in every call. The branches of a
    dense stage of a Jasper become one product. The model computes the same but for rounding. Its
    state_dict has no batch norms any more: it loads no state_dict of an unfolded model, and cannot
    be saved as a checkpoint. Folding again changes nothing.

    Args:
        model: A model in eval mode. It is changed, and returned.

    Raises:
        ValueError: The model is in training mode, or batch norms share a convolution. The model is
            then unchanged.
    """
    expect(
        not model.training,
        "model",
        "eval mode",
        "training mode",
        "Call model.eval() first: training needs batch norms.",
    )
    pairs = [
        (conv, parent, name)
        for part in model.modules()
        for conv, parent, name in _convolutions(part)
        if isinstance(getattr(parent, name), nn.BatchNorm1d)
    ]
    expect(
        len({id(conv) for conv, _, _ in pairs}) == len(pairs),
        "model",
        "a convolution of its own before each batch norm",
        "one that several share",
    )
    for conv, parent, name in pairs:
        fold_norm(conv, getattr(parent, name))
        setattr(parent, name, FoldedNorm().eval())
    for part in model.modules():
        if isinstance(part, Jasper):
            for number, stage in enumerate(part.stages):
                if isinstance(stage, JasperStage):
                    part.stages[number] = FoldedStage(stage).eval()
    return model


def _convolutions(part: nn.Module) -> Iterator[tuple[Any, nn.Module, str]]:
    """Each convolution of `part` that a norm follows, the parent of that norm, and its name."""
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
    """Give `conv` the weight and bias of `conv` followed by the batch norm `norm`.

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


class FoldedNorm(nn.Module):
    """Identity in place of a folded batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself; ValueError in training, which needs the statistics of the batch."""
        expect(
            not self.training,
            "model",
            "eval mode: its batch norms are folded",
            "training mode",
            "Load it again to train it.",
        )
        return x


class FoldedStage(nn.Module):
    """A stage of a Jasper for inference, its norms folded.

    The 1x1 convolutions of its branches become one, of the concatenated inputs.
    """

    def __init__(self, stage: JasperStage) -> None:
        super().__init__()
        convs: list[Any] = [repeat.conv for repeat in stage.repeats]
        *earlier, self.last = convs
        self.norms = FoldedNorm()
        self.layers = nn.ModuleList(nn.Sequential(conv, nn.ReLU(inplace=True)) for conv in earlier)
        branches = [branch.conv for branch in stage.branches]
        self.branches = _merged(branches) if branches else None

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
    """Tensors (B, C', T) as one (B, C, T), channels last in memory if those of the first are."""
    if sources[0].stride(1) == 1:
        return torch.cat([source.transpose(1, 2) for source in sources], 2).transpose(1, 2)
    return torch.cat(list(sources), 1)


@torch.no_grad()
def _merged(convs: Sequence[Any]) -> nn.Conv1d:
    """One 1x1 convolution of concatenated inputs that equals the sum of 1x1 `convs` with biases."""
    weight = torch.cat([conv.weight for conv in convs], 1)
    bias = torch.stack([conv.bias for conv in convs]).sum(0)  # torch sums in float32 at least
    channels, inputs, _ = weight.shape
    merged = nn.Conv1d(inputs, channels, 1, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    merged.bias = nn.Parameter(bias, requires_grad=False)
    return merged
