"""Fast speech recognition, and the workbench that measures it.

The library: asrkit.features, .text, .models, .losses, .decoders, .data, .transcribe and .training.
The workbench, which the library never imports: asrkit.workbench with .measure, .cost, .claims,
.plots, .lessons and .report.

Importing asrkit probes no device, sets no dtype and downloads nothing. A user without a name gets
one, such as uid12345.
"""

import getpass
import os

from asrkit import conflict as _conflict  # noqa: F401 - refuses files of another project


def _ensure_user_name() -> None:
    """Set $USER, and $HOME as Docker does, if the system has no name for the user's number.

    torch's compiler, which optimizers load too, names a folder after the user, and fails without a
    name; lhotse and Jupyter fail without a home.
    """
    try:
        getpass.getuser()
    except (KeyError, ImportError, OSError):  # no such number; no module for it; Python 3.13's
        if hasattr(os, "getuid"):
            os.environ["USER"] = f"uid{os.getuid()}"
            os.environ.setdefault("HOME", "/")


_ensure_user_name()


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asrkit.files import version

    return version()
