"""The process of one whole program that transcribes files; see peers/serving.py.

    $ python -m benchmarks.programs.program_worker sherpa_onnx_ctc_float32
    {"model": "onnx", "threads": 2, "do": "prepare", "first": "a.wav"}
    {"version": "sherpa-onnx 2.0.1"}
    {"model": "onnx", "threads": 2, "do": "observe", "files": ["a.wav", "b.wav"]}
    {"wall_ms": ..., "cpu_ms": ..., "texts": ["..."], "peak_B": ...}

"prepare" loads the model and transcribes one untimed file. `peak_B` is the peak memory of the
process since its start, including Python and the engine.

    python -m benchmarks.programs.program_worker NAME MODEL THREADS FILE     # prints a file's text
    python -m benchmarks.programs.program_worker --write FORM SOURCE TARGET  # writes a model
"""

import os
import sys
from importlib.metadata import version
from typing import Any

from benchmarks.peers.serving import Message, resident_B, serve, timed
from benchmarks.programs import fastconformer_programs, whisper_programs

PROGRAMS = fastconformer_programs.PROGRAMS | whisper_programs.PROGRAMS


class Server:
    """Answers requests to the program of this name."""

    def __init__(self, name: str) -> None:
        self.package, _, self.load = PROGRAMS[name]
        self.transcribe: Any = None

    def __call__(self, request: Message) -> Message:
        """The answer to one request."""
        if request["do"] == "prepare":
            self.transcribe = self.load(request["model"], request["threads"])
            self.transcribe([request["first"]])
            return {"version": f"{self.package} {version(self.package)}"}
        texts, times = timed(lambda: self.transcribe(request["files"]))
        return {**times, "texts": texts, "peak_B": resident_B("VmHWM")}


def write(form: str, source: str, target: str) -> None:
    """Write a model in another form."""
    import torch

    from benchmarks.programs import fastconformer_forms, whisper_forms

    with torch.no_grad():
        {**fastconformer_forms.FORMS, **whisper_forms.FORMS}[form](source, target)


def main(arguments: list[str]) -> None:
    """Write a model, transcribe one file, or answer requests."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    match arguments:
        case ["--write", form, source, target]:
            write(form, source, target)
        case [name, model, threads, file]:
            print(*PROGRAMS[name][2](model, int(threads))([file]), flush=True)
        case [name]:
            serve(Server(name))


if __name__ == "__main__":
    main(sys.argv[1:])
