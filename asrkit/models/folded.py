"""Batch norms folded into the convolutions before them, and the branches of a Jasper into one.

In inference a batch norm multiplies and adds the same numbers in every call.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asrkit.models.encoders import ConvEncoder
from asrkit.models.fastconformer import ConformerBlock
from asrkit.models.jasper import ConvNorm, Jasper, JasperStage, without_padding
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


class FoldedStage(nn.Module):
    """A stage of a Jasper for inference: its norms are folded, its branches are one product.

    The branches' 1x1 convolutions of several inputs are one of their channels side by side.
    """

    def __init__(self, stage: JasperStage) -> None:
        super().__init__()
        convs: list[Any] = [repeat.conv for repeat in stage.repeats]
        *before, last = convs
        self.norms = FoldedNorm()
        self.layers = nn.ModuleList(nn.Sequential(conv, nn.ReLU(inplace=True)) for conv in before)
        self.last: nn.Module = last
        self.branches: nn.Conv1d | None = None
        if len(stage.branches) > 0:
            branches: list[Any] = [branch.conv for branch in stage.branches]
            self.branches = side_by_side(branches)
        else:
            self.last = nn.Sequential(last, nn.ReLU(inplace=True))

    def forward(self, x: Tensor, sources: Sequence[Tensor], padding: Tensor | None) -> Tensor:
        """As `JasperStage.forward`.

        Args:
            x: Input (B, C, T), zero in its padding.
            sources: Input of each branch (B, C', T), zero in their padding.
            padding: (B, 1, T') bool, True in the padding of the output; None where there is none.
        """
        x = self.norms(x)
        for layer in self.layers:
            x = without_padding(layer(x), padding)
        x = self.last(x)
        if self.branches is not None:
            x = x.add_(self.branches(_concatenated(sources))).relu_()
        return without_padding(x, padding)


def _concatenated(sources: Sequence[Tensor]) -> Tensor:
    """Tensors (B, C', T) as one (B, C, T), channels last in memory where those of the first are."""
    if sources[0].stride(1) == 1:
        return torch.cat([source.transpose(1, 2) for source in sources], 2).transpose(1, 2)
    return torch.cat(list(sources), 1)


@torch.no_grad()
def side_by_side(convs: Sequence[nn.Conv1d]) -> nn.Conv1d:
    """One convolution of concatenated inputs that equals the sum of `convs`, 1x1 with biases."""
    weight = torch.cat([conv.weight for conv in convs], 1)
    wide = torch.promote_types(weight.dtype, torch.float32)
    biases = torch.stack([_bias(conv, wide) for conv in convs])
    channels, inputs, _ = weight.shape
    merged = nn.Conv1d(inputs, channels, 1, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    merged.bias = nn.Parameter(biases.sum(0).to(weight.dtype), requires_grad=False)
    return merged.eval()


def fold(model: M) -> M:
    """Fold the batch norms of the model's encoder into the convolutions before them, in place.

    The branches of a dense stage of a Jasper become one product. What the model computes is the
    same but for rounding. Its state_dict has no batch norms any more: it loads no state_dict of a
    model that is not folded, and cannot be saved as a checkpoint. Folding again changes nothing.

    Args:
        model: A model in eval mode. It is changed, and returned.

    Raises:
        ValueError: The model is in training mode; two convolutions share a norm, or two norms a
            convolution. The model is then as it was.
    """
    remedy = "Call model.eval() first: training needs batch norms."
    expect(not model.training, "model", "eval mode", "training mode", remedy)
    found = [place for part in model.modules() for place in _convolutions(part)]
    _expect_separate(found)
    for conv, norms, name in found:
        norm = getattr(norms, name)
        if isinstance(norm, nn.BatchNorm1d):
            dtype = conv.weight.dtype
            weight, bias = fold_norm(conv, norm)
            conv.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            conv.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
            setattr(norms, name, FoldedNorm().eval())
    for part in model.modules():
        if isinstance(part, Jasper):
            part.stages = nn.ModuleList(_folded_stage(stage) for stage in part.stages).eval()
    return model


def _folded_stage(stage: nn.Module) -> nn.Module:
    """A `FoldedStage` of a stage whose norms are folded; one that is a `FoldedStage` itself."""
    if isinstance(stage, JasperStage):
        return FoldedStage(stage)
    return stage


def _expect_separate(found: Sequence[tuple[Any, nn.Module, str]]) -> None:
    """ValueError where a convolution or a batch norm of `found` occurs twice."""
    norms = [getattr(holder, name) for _, holder, name in found]
    counts = Counter(id(norm) for norm in norms if isinstance(norm, nn.BatchNorm1d))
    counts.update(id(conv) for conv, _, _ in found)
    most = max(counts.values(), default=1)
    wanted = "a norm for each convolution, and a convolution for each norm"
    expect(most == 1, "model", wanted, f"one that {most} share", "Copy it for each.")


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
    bias = _bias(conv, wide)
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


def _bias(conv: nn.Conv1d, dtype: torch.dtype) -> Tensor:
    """The bias of `conv` in `dtype`; zeros where it has none."""
    if conv.bias is None:
        return torch.zeros(conv.out_channels, dtype=dtype, device=conv.weight.device)
    return conv.bias.detach().to(dtype)


def _convolutions(part: nn.Module) -> Iterator[tuple[Any, nn.Module, str]]:
    """Convolutions of `part`; of the norm behind each, the module that holds it, and its name."""
    if isinstance(part, ConformerBlock):
        yield part.depthwise, part, "batch_norm"
    if isinstance(part, ConvNorm):
        yield part.conv, part, "norm"
    if isinstance(part, ConvEncoder):
        for number, conv in enumerate(part.strides):
            yield conv, part.stride_norms, str(number)
        for number, conv in enumerate(part.convs):
            yield conv, part.norms, str(number)
