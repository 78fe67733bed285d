"""Sound files to transcripts: `transcribe` for files, `Recognizer` for waveforms.

`transcribe_in_workers` is `transcribe` in several processes that share one model.

In the order of a run:

    options.py     every option, described and checked
    plan.py        options to a model, a dtype and settings; fingerprints of transcripts
    audio.py       recordings to samples, read ahead by threads
    pauses.py      loudness and pauses, where recordings are cut
    windows.py     samples to windows, batches and transcripts
    parts.py       parts of a recording, and the order in which their windows are decoded
    progress.py    progress bars and counts
    recognizer.py  waveforms to features, encoder frames and hypotheses
    decoding.py    the decoder of each kind of model; whisper.py: that of a Whisper
    words.py       labels joined where windows overlap, and grouped into words
    formats.py     transcripts as text, JSON, subtitles and CTM
    folder.py      transcripts in a folder, where an interrupted run resumes
    bulk/          several workers; corpora in shards, also on a Ray cluster

Names are imported when they are first used, so that the command line can read `options` without
loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asrkit.transcribe.audio import find, read_audio
    from asrkit.transcribe.bulk.in_workers import transcribe_in_workers
    from asrkit.transcribe.bulk.layout import Layout, choose_layout
    from asrkit.transcribe.folder import Folder
    from asrkit.transcribe.formats import Transcript
    from asrkit.transcribe.options import BeamOptions, PipelineConfig, PromptOptions, WindowOptions
    from asrkit.transcribe.recognizer import Recognizer, recognize
    from asrkit.transcribe.windows import transcribe

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
    "bulk.in_workers": ["transcribe_in_workers"],
    "bulk.layout": ["Layout", "choose_layout"],
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
