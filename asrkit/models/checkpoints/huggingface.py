"""Hugging Face folders: config.json and the weights' names, read as asrkit's."""

from pathlib import Path

from asrkit.models.checkpoints.own import Contents


def read(path: Path) -> Contents:
    """Contents of the folder `path`."""
    raise ValueError(f"model: {path.name} is a Hugging Face folder, which this version does not read yet.")
