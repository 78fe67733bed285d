"""Linear layers for inference on a CPU: weights laid out once for oneDNN, which otherwise does so
in every call.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)
# the layout is chosen for products of about so many frames; others are as right, and about as fast
ROWS = 128


class PackedLinear(nn.Module):
    """What `linear` computes in inference, with its weight in an opaque layout: it cannot be saved,
    moved or trained.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach(), ROWS
        )  # as torch.compile's freezing does
        self.bias = None if linear.bias is None else linear.bias.detach()

    def _save_to_state_dict(self, *given: Any) -> None:
        self._refuse("cannot be saved", "Save the model before it is packed or optimized.")

    def _apply(
        self, *given: Any, **how: Any
    ) -> Any:  # what .to(), .half(), .cuda() and their like call
        self._refuse("cannot be moved or cast", "Do that before it is packed or optimized.")

    def _refuse(self, what: str, remedy: str) -> None:
        expect(False, "model", "layers that are not packed", f"packed ones, which {what}", remedy)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in) in the dtype of the weight."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN has products of weights in `dtype` that are laid out before."""
    halves = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype in halves and getattr(torch.ops.mkldnn, f"_is_mkldnn_{halves[dtype]}_supported")()
    )


def packs(model: nn.Module) -> bool:
    """Whether `pack` takes the model: in eval mode, on a CPU, in dtypes for which oneDNN has
    products there.
    """
    elsewhere = any(weight.device.type != "cpu" for weight in model.parameters())
    return not (model.training or elsewhere) and all(
        multiplies(dtype) for dtype in {weight.dtype for weight in model.parameters()}
    )


def pack(model: M) -> M:
    """`model` itself, every nn.Linear in it packed; ValueError where `packs` says no."""
    expect(
        packs(model),
        "model",
        "one in eval mode on a CPU, in a dtype that its oneDNN multiplies",
        type(model).__name__,
    )
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return model
