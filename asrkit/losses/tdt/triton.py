"""The TDT loss with Triton's passes over the logits.

The lattice between them is Numba's CUDA kernel on a GPU where numba-cuda works, else plain torch.
"""

from importlib import import_module

from torch import Tensor

from asrkit.losses.availability import lattice_beside
from asrkit.losses.gradient import kernel_loss
from asrkit.losses.logit_rows import triton
from asrkit.losses.nodes import LatticeOptions, Nodes


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    lattice = import_module(f"asrkit.losses.tdt.{lattice_beside(logits)}").lattice
    return kernel_loss(logits, targets, nodes, options, triton, lattice)
