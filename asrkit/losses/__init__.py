"""Sequence losses on the lattice of frames and labels."""

from asrkit.losses.rnnt import resolve, rnnt_loss

__all__ = ["resolve", "rnnt_loss"]
