"""Sequence losses on the lattice of frames and labels.

A call passes through four files. The public function is in `rnnt.py`, `tdt.py` or `packed.py`.
`arguments.py` checks its arguments and chooses an implementation. `gradient.py` has the autograd
function, which calls the implementation:

    wavefront.py     plain torch, on any device
    numba_cpu.py     compiled for the CPU, with the scalar functions of simd.py
    numba_cuda.py    for a GPU without Triton; RNN-T only
    triton.py        for a GPU; triton_rows.py has the passes over the logits

An implementation has three functions: `arc_log_probs` computes the log-probabilities of the arcs
from the logits, `lattice` the log-likelihoods and the posteriors of the arcs, and `gradient` the
gradient over the logits. `lattice.py` defines the records that pass between them, and the positions
of the lattice nodes in memory.

`reference.py` has the recursions in plain loops: read it first. `lean/` computes the loss without
building the logits. `ctc.py` has the CTC loss, whose lattice is a different one; it uses none of
the files above but `arguments.py`.
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
