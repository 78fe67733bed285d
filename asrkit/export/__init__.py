"""Exported models: `export` writes a folder for inference engines and their clients, from the
traced `graphs` of a model; `load_exported` runs the encoder of such a folder in an engine.

Importing this needs none of the engines' packages.
"""

from asrkit.export.engines import load_exported
from asrkit.export.folder import is_exported
from asrkit.export.writing import export

__all__ = ["export", "is_exported", "load_exported"]
