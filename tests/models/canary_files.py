"""A tiny Canary in files of both peers, its weights those of tests/golden: for tests of readers and of transcription."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models.attention_decoder import sines

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))
import parity_attention_cases as known  # noqa: E402

POSITIONS = "transf_decoder._embedding.position_embedding.pos_enc"
OUTPUT = "log_softmax.mlp.layer0.weight"
CASE = known.attention_goldens()["canary2"]


def golden(peer: str) -> dict[str, Any]:
    """The committed numbers of a peer."""
    return json.loads((HERE.parent / "golden" / f"{peer}_attention.json").read_text())


def weights_of(peer: str) -> dict[str, Tensor]:
    """Weights by the peer's names."""
    shapes = golden(peer)["canary2"]["shapes"]
    states = {name: torch.zeros(shape) for name, shape in shapes.items()}
    if peer == "transformers":
        return known.fill_attention(states, "proj_out.bias", ("proj_out.weight",))
    states["preprocessor.featurizer.window"] = torch.hann_window(400, periodic=False)
    states["preprocessor.featurizer.fb"] = mel_bands(FeatureConfig()).T[None]
    states[POSITIONS] = sines(*shapes[POSITIONS], torch.zeros(()))
    kept = ("featurizer.window", "featurizer.fb", "pos_enc", "mlp.layer0.weight")
    weights = known.fill_attention(states, "log_softmax.mlp.layer0.bias", kept)
    weights[OUTPUT] = weights["transf_decoder._embedding.token_embedding.weight"]
    return weights


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`config` with other values at keys, sections apart by "__"; None of a name ending in "__" takes the key away."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, last = key.removesuffix("__").split("__")
        section = config
        for name in sections:
            section = section[name]
        if key.endswith("__"):
            del section[last]
        else:
            section[last] = value
    return config


def archive(path: Path, case: dict[str, Any] = CASE, **changes: Any) -> Path:
    """A .nemo archive whose config has other values at some keys."""
    config = changed(known.archive_config(case), **changes)
    return known.write_archive(path, case, weights_of("nemo"), config)


def folder(path: Path, **changes: Any) -> Path:
    """A Hugging Face folder whose config.json has other values at some keys."""
    known.write_canary(path, CASE, weights_of("transformers"))
    file = path / "config.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), **changes)))
    return path
