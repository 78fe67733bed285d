"""A convolution whose input is split in time over the ranks of a group."""

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from asrkit.parallel.groups import place_in
from asrkit.parallel.halo import Edges, check_halo, halo, start
from asrkit.shapes import dims, expect, whole


def conv1d_split(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dilation: int = 1,
    stride: int = 1,
    group: dist.ProcessGroup | None = None,
    overlap: bool = True,
) -> Tensor:
    """This rank's part of a "same" convolution of the whole: (B, D, T / stride).

    It equals a slice of conv1d(whole, weight, bias, stride, dilation * (K // 2), dilation). Weight
    and bias get the gradient of this part; its sum over the ranks is that of the whole.

    Args:
        x: This rank's part (B, C, T).
        weight: (D, C / groups, K), K odd; fewer input channels than `x` has make groups of them.
        bias: (D,), or None.
        dilation: Frames between two taps of the kernel.
        stride: Frames between two outputs; T is a multiple of it.
        group: The ranks, in the order of their parts; None for all processes.
        overlap: Whether the part is convolved while the edges travel and what they add is
            computed after; else the edges are waited for, which saves two small convolutions.

    Raises:
        ValueError: T is no multiple of the stride or less than the halo, K is even, or the group
            has one rank.
    """
    place = place_in(group, "torch.nn.functional.conv1d")
    _, C, T = dims(x, "B C T", "x")
    _, channels, K = dims(weight, "D C K", "weight")
    for name, size in (("dilation", dilation), ("stride", stride)):
        expect(whole(size, 1), name, "at least 1 frame", repr(size))
    expect(K % 2 == 1, "weight", "an odd number of taps", K)
    divides = C % channels == 0
    expect(divides, "weight", f"input channels that divide those of x, {C}", channels)
    remedy = "Pad the whole before it is split."
    expect(T % stride == 0, "x", f"frames in multiples of stride={stride}", T, remedy)
    reach = dilation * (K // 2)
    left = reach
    right = max(0, reach - stride + 1)  # the last output's window ends that far behind the part
    check_halo(x, left, right)
    groups = C // channels
    if not overlap:
        wide = halo(x, left, right, group)
        return F.conv1d(wide, weight, bias, stride, dilation=dilation, groups=groups)
    pending = start(x, left, right, place, group)
    inner = F.conv1d(x, weight, bias, stride, reach, dilation, groups)
    before, after = Edges.apply(x, pending)

    def add_edge(edge: Tensor, first: int, outputs: int, offset: int) -> Tensor:
        """What an edge adds to `outputs` outputs from `first` on, as (B, D, T / stride).

        The edge lies `offset` frames behind the start of the window of output `first`.
        """
        window = (outputs - 1) * stride + 2 * reach + 1
        rest = window - offset - edge.shape[-1]
        padded = F.pad(edge, (offset, rest))
        added = F.conv1d(padded, weight, None, stride, dilation=dilation, groups=groups)
        return F.pad(added, (first, T // stride - first - outputs))

    if left:
        outputs = -(-left // stride)
        inner = inner + add_edge(before, first=0, outputs=outputs, offset=0)
    if right:
        first = -(-(T - reach) // stride)
        outputs = T // stride - first
        inner = inner + add_edge(after, first, outputs, offset=T + reach - first * stride)
    return inner
