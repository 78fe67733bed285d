"""Hugging Face folders: config.json names the kind of model, and with it who reads the folder.

A key that config.json lacks has the value that transformers 5.23 gives it: its files leave defaults
out. Keys whose values no weight shows are refused by name where asrkit does not compute them.
"""

from pathlib import Path

from asrkit.models.checkpoints import huggingface_canary, huggingface_parakeet, whisper
from asrkit.models.checkpoints.folders import read_json
from asrkit.models.checkpoints.own import Contents
from asrkit.shapes import expect

READERS = {
    **dict.fromkeys(huggingface_parakeet.KINDS, huggingface_parakeet.read),
    "canary": huggingface_canary.read,
    "whisper": whisper.read,
}


def read(path: Path) -> Contents:
    """Contents of the folder `path`.

    Raises:
        ValueError: A file is damaged or missing, or asks for what is not supported.
    """
    values = read_json(path, "config.json")
    kind = str(values.get("model_type"))
    remedy = "asrkit reads the Parakeet, Canary and Whisper models of transformers."
    expect(kind in READERS, "model_type", f"one of {[*READERS]}", repr(kind), remedy)
    return READERS[kind](path, values)
