"""NeMo's `.nemo` archives: the config's keys and the weights' names, read as asrkit's."""

from pathlib import Path

from asrkit.models.checkpoints.own import Contents


def read(path: Path) -> Contents:
    """Contents of the archive `path`."""
    raise ValueError(f"model: {path.name} is a NeMo archive, which this version does not read yet.")
