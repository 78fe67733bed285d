"""A whole model of convolutions whose frames are split in time over the ranks of a group."""

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from asrkit.parallel.convolution import conv1d_split
from asrkit.parallel.groups import place_in
from asrkit.parallel.norm import BatchNorm
from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)
EACH_FRAME = (nn.Linear, nn.LayerNorm, nn.ReLU, nn.SiLU, nn.GELU, nn.Dropout, nn.Identity)


def split_in_time(model: M, group: dist.ProcessGroup | None = None) -> M:
    """The model, from now on for one part of the time axis a rank; changed in place.

    Each nn.Conv1d becomes a `conv1d_split`, each nn.BatchNorm1d a `BatchNorm`. Parameters and
    buffers stay the same tensors under the same names, so that an optimizer keeps them. A layer's
    halo is that of its own kernel, however far the whole model sees.

    Each rank then calls the model on its part, as long as the widest halo in every layer and a
    multiple of what the model strides by, with the lengths that its part has of each utterance.
    For a `Jasper`, every utterance has to reach into the last part. Dropout draws on each rank.

    Args:
        model: Convolutions over time, batch norms, and layers that treat each frame by itself. What
            its own code does between them has to treat each frame by itself too: that is not
            checked.
        group: The ranks, in the order of their parts; None for all processes.

    Raises:
        ValueError: A layer that is none of these, a convolution whose padding is not "same" zeros,
            a norm without parameters or running statistics, or a group of one rank.
    """
    place_in(group, "the model as it is")
    for name, layer in model.named_modules():
        _check(name, layer)
    _swap(model, group)
    return model


class SplitConv1d(nn.Module):
    """`conv1d_split` with the weight and bias of a convolution: (B, C, T) to (B, D, T / stride).

    Args:
        conv: An nn.Conv1d with "same" padding.
        group: The ranks; None for all processes.
    """

    def __init__(self, conv: nn.Conv1d, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = conv.weight
        self.bias = conv.bias
        (self.stride,) = conv.stride
        (self.dilation,) = conv.dilation
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the convolution of the whole, of its part `x`."""
        return conv1d_split(
            x,
            self.weight,
            self.bias,
            dilation=self.dilation,
            stride=self.stride,
            group=self.group,
        )


def _check(name: str, layer: nn.Module) -> None:
    """Raise ValueError for a layer that cannot be split."""
    got = f"{name or 'the model'}: {layer}"
    if type(layer) is nn.Conv1d:
        (kernel,) = layer.kernel_size
        (dilation,) = layer.dilation
        same = kernel % 2 == 1 and layer.padding == (dilation * (kernel // 2),)
        zeros = layer.padding_mode == "zeros"
        expect(same and zeros, "model", "odd kernels padded by zeros on both sides", got)
    elif type(layer) is nn.BatchNorm1d:
        whole = layer.affine and layer.track_running_stats and layer.momentum is not None
        expect(whole, "model", "norms with parameters, running statistics and a momentum", got)
    elif not isinstance(layer, EACH_FRAME):
        inner = any(True for _ in layer.children())
        own = any(True for _ in layer.parameters(recurse=False))
        empty = isinstance(layer, nn.ModuleList)
        wanted = "convolutions over time, batch norms and layers of single frames"
        expect((inner or empty) and not own, "model", wanted, got)


def _swap(parent: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Replace what lies in `parent`."""
    for name, child in list(parent.named_children()):
        new: Any = None
        if type(child) is nn.Conv1d:
            new = SplitConv1d(child, group)
        elif type(child) is nn.BatchNorm1d:
            new = _norm(child, group)
        else:
            _swap(child, group)
        if new is not None:
            setattr(parent, name, new.train(child.training))


def _norm(norm: nn.BatchNorm1d, group: dist.ProcessGroup | None) -> BatchNorm:
    """A norm over all ranks with the parameters and buffers of `norm`."""
    assert norm.momentum is not None
    new = BatchNorm(norm.num_features, group=group, eps=norm.eps, momentum=norm.momentum)
    new.weight = norm.weight
    new.bias = norm.bias
    new.running_mean = norm.running_mean
    new.running_var = norm.running_var
    new.num_batches_tracked = norm.num_batches_tracked
    return new
