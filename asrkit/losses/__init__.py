"""Sequence losses on the lattice of frames and labels."""

from asrkit.losses.lean import rnnt_loss_lean, tdt_loss_lean
from asrkit.losses.rnnt import resolve, rnnt_loss

__all__ = ["resolve", "rnnt_loss", "rnnt_loss_lean", "tdt_loss_lean"]
