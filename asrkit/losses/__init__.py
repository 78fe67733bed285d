"""Sequence losses on the lattice of frames and labels.

How a call travels: `rnnt.py` or `tdt.py`, the public functions (also `packed.py`, and `lean/`,
which never builds the logits); `lattice.py` checks their arguments, finds the nodes and picks an
implementation; `gradient.py` has the autograd function, which calls the three steps of

    wavefront.py     plain torch, on any device
    numba_cpu.py     compiled for the CPU, with the scalar functions of simd.py
    triton.py        on a GPU; triton_rows.py has its passes over the logits

logits -> log-probabilities of the lattice's arcs; these -> log-likelihood, posteriors of the arcs;
and, backward, posteriors -> gradient over the logits.

`reference.py` does all of this in plain loops: read it first. `ctc.py` is the CTC loss that waits
for no GPU; it stands apart from the lattices.
"""

from asrkit.losses.ctc import ctc_loss
from asrkit.losses.gradient_memory import release_gradient_memory
from asrkit.losses.lean import rnnt_loss_lean, tdt_loss_lean
from asrkit.losses.packed import pack_joint, packed_offsets, rnnt_loss_packed
from asrkit.losses.rnnt import rnnt_loss
from asrkit.losses.splitting import split_batches
from asrkit.losses.tdt import tdt_loss

__all__ = [
    "ctc_loss",
    "pack_joint",
    "packed_offsets",
    "release_gradient_memory",
    "rnnt_loss",
    "rnnt_loss_lean",
    "rnnt_loss_packed",
    "split_batches",
    "tdt_loss",
    "tdt_loss_lean",
]
