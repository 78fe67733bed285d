"""Fast speech recognition, and the workbench that measures it.

The library: asrkit.features, .text, .models, .losses, .decoders, .data, .transcribe and .training.
The workbench, which the library never imports: asrkit.workbench with .measure, .cost, .bench,
.claims, .plots, .lessons and .report.

Importing asrkit decides nothing: no device is probed, no dtype set, nothing downloaded. A
user without a name gets one, such as uid12345.
"""

import getpass
import os

from asrkit import conflict as _conflict  # noqa: F401 - refuses files of another project


def _name_a_nameless_user() -> None:
    """Set $USER, and $HOME as Docker does, where the system knows no name for the user's number.

    torch's compiler, which optimizers load as well, names a folder by the user, and fails there;
    lhotse and Jupyter fail without a home.
    """
    try:
        getpass.getuser()
    except (KeyError, ImportError, OSError):  # no such number; no module for it; Python 3.13's
        if hasattr(os, "getuid"):
            os.environ["USER"] = f"uid{os.getuid()}"
            os.environ.setdefault("HOME", "/")


_name_a_nameless_user()


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asrkit.files import version

    return version()
