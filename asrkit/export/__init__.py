"""Models that leave: `export` writes a model for inference engines and their clients, and
`open_engine` runs its encoder in one of them.

Importing this needs none of the engines' packages.
"""

from asrkit.export.engines import ENGINES, Engine, open_engine
from asrkit.export.folder import Exported, is_exported, read_exported
from asrkit.export.writing import export

__all__ = [
    "ENGINES",
    "Engine",
    "Exported",
    "export",
    "is_exported",
    "open_engine",
    "read_exported",
]
