"""Sound files to transcripts: `transcribe` for files, `Recognizer` for waveforms.

`transcribe_in_workers` is `transcribe` in several processes that share one model.

Names are imported when they are first used, so that the command line can read `options` without
loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" makes a name public
    from asrkit.transcribe.audio import find as find
    from asrkit.transcribe.audio import read_audio as read_audio
    from asrkit.transcribe.folder import Folder as Folder
    from asrkit.transcribe.formats import Transcript as Transcript
    from asrkit.transcribe.options import BeamOptions as BeamOptions
    from asrkit.transcribe.options import PipelineConfig as PipelineConfig
    from asrkit.transcribe.options import PromptOptions as PromptOptions
    from asrkit.transcribe.options import WindowOptions as WindowOptions
    from asrkit.transcribe.recognizer import Recognizer as Recognizer
    from asrkit.transcribe.recognizer import recognize as recognize
    from asrkit.transcribe.windows import transcribe as transcribe
    from asrkit.transcribe.workers import Layout as Layout
    from asrkit.transcribe.workers import choose_layout as choose_layout
    from asrkit.transcribe.workers import transcribe_in_workers as transcribe_in_workers

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
