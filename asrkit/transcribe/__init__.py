"""Sound files to transcripts: `transcribe` for files, `Recognizer` for waveforms.

`transcribe_in_workers` is `transcribe` in several processes that share one model.

Names are imported when they are first used, so that the command line can read `options` without
loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asrkit.transcribe.audio import find, read_audio
    from asrkit.transcribe.folder import Folder
    from asrkit.transcribe.formats import Transcript
    from asrkit.transcribe.options import BeamOptions, PipelineConfig, PromptOptions, WindowOptions
    from asrkit.transcribe.recognizer import Recognizer, recognize
    from asrkit.transcribe.windows import transcribe
    from asrkit.transcribe.workers import Layout, choose_layout, transcribe_in_workers

__all__ = [
    "BeamOptions",
    "Folder",
    "Layout",
    "PipelineConfig",
    "PromptOptions",
    "Recognizer",
    "Transcript",
    "WindowOptions",
    "choose_layout",
    "find",
    "read_audio",
    "recognize",
    "transcribe",
    "transcribe_in_workers",
]

_FILES = {  # the file of this folder that defines each name
    "audio": ["find", "read_audio"],
    "folder": ["Folder"],
    "formats": ["Transcript"],
    "options": ["BeamOptions", "PipelineConfig", "PromptOptions", "WindowOptions"],
    "recognizer": ["Recognizer", "recognize"],
    "windows": ["transcribe"],
    "workers": ["Layout", "choose_layout", "transcribe_in_workers"],
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
