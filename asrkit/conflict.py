"""Refuses to run among the files of the other project named asrkit (on PyPI): they share a folder.

What needs nothing else of asrkit imports this first, so that whichever project was installed last,
the two are not mixed.
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
