"""The TDT loss with rows in Triton, and a lattice beside them: Numba's kernels on a GPU that has
them, else torch's.
"""

from importlib import import_module

from torch import Tensor

from asrkit.losses.availability import lattice_beside
from asrkit.losses.gradient import lattice_loss
from asrkit.losses.logit_rows import triton
from asrkit.losses.nodes import LatticeOptions, Nodes


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    lattice = import_module(f"asrkit.losses.tdt.{lattice_beside(logits)}").lattice
    return lattice_loss(logits, targets, nodes.of(logits), options, triton, lattice)
