"""Linear layers for inference on a CPU, their weights laid out for oneDNN once.

Otherwise oneDNN does so in every call.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asrkit.shapes import expect

M = TypeVar("M", bound=nn.Module)
# Frames of the products that the layout is chosen for; others are as right, and about as fast.
ROWS = 128


class PackedLinear(nn.Module):
    """A linear layer for inference whose weight has an opaque layout.

    It cannot be saved, moved or trained.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # As torch.compile's freezing does.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias: Tensor | None = None
        if linear.bias is not None:
            self.bias = linear.bias.detach()

    def _save_to_state_dict(self, *_: Any) -> None:
        self._refuse("cannot be saved", "Save the model before it is packed or optimized.")

    def _apply(self, *_: Any, **__: Any) -> Any:  # .to(), .half(), .cuda() and their like call it
        self._refuse("cannot be moved or cast", "Do that before it is packed or optimized.")

    def _refuse(self, what: str, remedy: str) -> None:
        expect(False, "model", "layers that are not packed", f"packed ones, which {what}", remedy)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in) in the dtype of the weight."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN multiplies packed weights of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def packs(model: nn.Module) -> bool:
    """Whether `pack` takes the model: in eval mode, on a CPU, in dtypes that oneDNN multiplies."""
    if model.training:
        return False
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        return False
    dtypes = {weight.dtype for weight in model.parameters()}
    return all(multiplies(dtype) for dtype in dtypes)


def pack(model: M) -> M:
    """Replace every nn.Linear of the model by a `PackedLinear`, in place, and return the model.

    Args:
        model: A model for which `packs` is True.

    Raises:
        ValueError: `packs` is False for it.
    """
    wanted = "one in eval mode on a CPU, in a dtype that its oneDNN multiplies"
    expect(packs(model), "model", wanted, type(model).__name__)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return model
