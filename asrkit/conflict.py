"""Refuses to run among the files of the other project named asrkit (on PyPI): they share a folder.

What needs nothing else of asrkit imports this first, so that whichever project was installed last,
the two are not mixed.
"""

from pathlib import Path

_packages = Path(__file__).resolve().parents[1]
if others := sorted(_packages.glob("asrkit-*.dist-info")):  # ours is asrkit_workbench-*
    raise ImportError(
        f"asrkit: expected no other package of this name, got {others[0].stem} in {_packages}. "
        "Remove both (pip uninstall asrkit asrkit-workbench), then install asrkit-workbench."
    )
