"""Raises ImportError if the other project named asrkit (on PyPI) is installed in the same folder.

Modules that need nothing else of asrkit import this first, so that the files of the two projects
are never mixed, whichever was installed last.
"""

from pathlib import Path

_packages = Path(__file__).resolve().parents[1]
_others = sorted(_packages.glob("asrkit-[0-9]*.dist-info/METADATA"))  # ours is asrkit_workbench-*
if _others:
    raise ImportError(
        f"asrkit: expected no other package of this name, got {_others[0].parent.stem} in "
        f"{_packages}. Remove both (pip uninstall asrkit asrkit-workbench), then install "
        "asrkit-workbench."
    )
