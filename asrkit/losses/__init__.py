"""Sequence losses on the lattice of frames and labels.

How a call travels, and where to look for what:

    rnnt/, tdt/, packed.py (and lean/, which never builds the logits): the public functions. They
                check the arguments, pick an implementation and reduce over the batch:
                `checks.py`, `availability.py`
    gradient.py the autograd function that they call: which of the following runs when
                (gradient_memory.py: where a large gradient lies)
    logit_rows/ logits -> log-probabilities of the lattice's arcs (forward), and posteriors of the
                arcs -> gradient of the loss over the logits (backward)
    rnnt/, tdt/ the lattices: log-probabilities of the arcs -> log-likelihood, arc posteriors
    ctc.py      the CTC loss that waits for no GPU; it stands apart from the lattices
    nodes.py    where the nodes of a lattice lie in memory, and what passes between these steps

`rnnt/reference.py` and `tdt/reference.py` do all of this in plain loops: read them first.
"""

from asrkit.losses.ctc import ctc_loss
from asrkit.losses.gradient_memory import release as release_gradient_memory
from asrkit.losses.lean import rnnt_loss_lean, tdt_loss_lean
from asrkit.losses.packed import pack_joint, packed_offsets, rnnt_loss_packed
from asrkit.losses.rnnt import resolve, rnnt_loss
from asrkit.losses.splitting import split_batches
from asrkit.losses.tdt import tdt_loss

__all__ = [
    "ctc_loss",
    "pack_joint",
    "packed_offsets",
    "release_gradient_memory",
    "resolve",
    "rnnt_loss",
    "rnnt_loss_lean",
    "rnnt_loss_packed",
    "split_batches",
    "tdt_loss",
    "tdt_loss_lean",
]
