"""Fast speech recognition, and the workbench that measures it.

The library: asrkit.features, .text, .models, .losses, .decoders, .data, .transcribe and .training.
The workbench, which the library never imports: asrkit.workbench with .measure, .cost, .bench,
.claims, .plots, .lessons and .report.

Importing asrkit decides nothing: no device is probed, no dtype set, nothing downloaded.
"""

from asrkit import conflict as _conflict  # noqa: F401 - refuses files of another project


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asrkit.files import version

    return version()
