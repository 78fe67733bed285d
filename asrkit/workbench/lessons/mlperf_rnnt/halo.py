"""A convolution over time whose frames are shared out, as several GPUs would (notebook 10)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.shapes import dims, expect, whole


def split_convolution(x: Tensor, weight: Tensor, parts: int, *, halo: bool = True) -> Tensor:
    """The convolution of x (B, C, T) with `weight`, zeros around it, part by part: (B, D, T).

    A part convolves its own frames without waiting. Its halo, the K // 2 frames beside it that its
    neighbours hold, may arrive meanwhile; what it adds to the outputs at the edges is computed by
    itself and added (MLPerf v1.0's account of 3D U-Net).

    Args:
        x: frames (B, C, T).
        weight: (D, C, K), K odd.
        parts: how many share the frames; each holds K // 2 of them at least.
        halo: False leaves out what the neighbours add.
    """
    _, C, T = dims(x, "B C T", "x")
    _, _, K = dims(weight, "D C K", "weight", C=C)
    reach = K // 2
    expect(K % 2 == 1, "weight", "an odd kernel", K)
    most = T // max(1, reach)
    expect(whole(parts, 1, most), "parts", f"1 to {most}, of {reach} frames at least", parts)
    held = x.tensor_split(parts, 2)
    outputs = []
    for place, own in enumerate(held):
        out = F.conv1d(own, weight, padding=reach)
        rest = own.shape[2] - reach  # outputs that one neighbour's frames do not reach
        if halo and reach and place > 0:
            before = F.pad(held[place - 1][..., -reach:], (0, 2 * reach))
            out = out + F.pad(F.conv1d(before, weight), (0, rest))
        if halo and reach and place < parts - 1:
            behind = F.pad(held[place + 1][..., :reach], (2 * reach, 0))
            out = out + F.pad(F.conv1d(behind, weight), (rest, 0))
        outputs.append(out)
    return torch.cat(outputs, 2)
