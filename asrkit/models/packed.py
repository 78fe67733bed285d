"""Linear layers for inference on a CPU: weights laid out once for oneDNN, which otherwise does so in every call."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)
ROWS = 128  # the layout is chosen for products of about so many frames; others are as right, and about as fast


class PackedLinear(nn.Module):
    """What `linear` computes in inference, with its weight in an opaque layout: it cannot be saved, moved or trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)  # as torch.compile's freezing does
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in) in the dtype of the weight."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack(model: M) -> M:
    """`model` itself, every nn.Linear in it packed; ValueError where it is not in eval mode on a CPU with oneDNN."""
    weights = {weight.device.type for weight in model.parameters()}
    expect(not model.training and weights <= {"cpu"}, "model", "one in eval mode on a CPU", f"{weights}, training={model.training}")
    expect(torch.backends.mkldnn.is_available(), "model", "a torch with oneDNN", "none")
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return model
