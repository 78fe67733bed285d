"""Sequence losses on the lattice of frames and labels."""

from asrkit.losses.lean import rnnt_loss_lean, tdt_loss_lean
from asrkit.losses.packed import pack_joint, packed_offsets, rnnt_loss_packed
from asrkit.losses.rnnt import resolve, rnnt_loss
from asrkit.losses.splitting import split_batches
from asrkit.losses.tdt import tdt_loss

__all__ = [
    "pack_joint",
    "packed_offsets",
    "resolve",
    "rnnt_loss",
    "rnnt_loss_lean",
    "rnnt_loss_packed",
    "split_batches",
    "tdt_loss",
    "tdt_loss_lean",
]
