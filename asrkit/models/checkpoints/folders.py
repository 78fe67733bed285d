"""Files of a Hugging Face folder: JSON, the feature extractor's settings, weights.

Pickled weights are not read.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from asrkit.models.checkpoints.own import read_safetensors
from asrkit.shapes import expect

MAX_SIZE = 10**6  # of tokens; a config with more is taken for damaged
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in file `name` of the folder, empty where there is no such file."""
    if not (path / name).is_file():
        return {}
    try:
        values = json.loads((path / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # its encoding, its syntax, its depth
        raise ValueError(f"model: {name} of {path.name} is no JSON ({error}).") from None
    expect(isinstance(values, dict), "model", f"a JSON object in {name}", type(values).__name__)
    return values


def tokenizer_json(path: Path) -> dict[str, Any]:
    """The tokenizer of the folder; ValueError where there is none."""
    contents = read_json(path, "tokenizer.json")
    expect(bool(contents), "model", "tokenizer.json", f"none in {path.name}")
    return contents


def extractor(path: Path) -> dict[str, Any]:
    """Settings of the feature extractor, which stand in either of two files."""
    own, processor = _PROCESSORS
    settings = read_json(path, own) or read_json(path, processor).get("feature_extractor") or {}
    wanted = f"{own} or a feature_extractor in {processor}"
    expect(bool(settings), "model", wanted, "neither")
    return {**settings}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the shards that its index names."""
    files = ["model.safetensors"]
    index = read_json(path, "model.safetensors.index.json")
    if index and not (path / files[0]).is_file():
        files = sorted({*index["weight_map"].values()})
    weights: dict[str, Tensor] = {}
    for name in files:
        plain = Path(name).name == name and name.endswith(".safetensors")
        expect(plain, "weight_map", "names of .safetensors files in the folder", repr(name))
        remedy = "Pickled weights (.bin, .pt) are not read."
        expect((path / name).is_file(), "model", name, f"none in {path.name}", remedy)
        weights |= read_safetensors(path / name)[0]
    return weights
