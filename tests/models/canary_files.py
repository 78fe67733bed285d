"""A tiny Canary in files of both peers, with the weights of tests/golden, for tests of readers and of transcription."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.models.attention_decoder import sines

sys.path.append(str(Path(__file__).resolve().parent))
import parity_attention_cases as known
from published import changed, edit, featurizer, golden, without_gone, zeros

POSITIONS = "transf_decoder._embedding.position_embedding.pos_enc"
OUTPUT = "log_softmax.mlp.layer0.weight"
Changes = dict[str, Any] | None  # values at dotted keys


def weights_of(name: str = "canary2") -> dict[str, Tensor]:
    """Weights of an archive, by NeMo's names."""
    states = zeros(golden("nemo_attention")[name]["shapes"])
    config = known.archive_config(known.attention_cases()[name])
    states |= featurizer(config["preprocessor"])
    states[POSITIONS] = sines(*states[POSITIONS].shape, torch.zeros(()))
    kept = ("featurizer.window", "featurizer.fb", "pos_enc", "mlp.layer0.weight")
    weights = known.fill_attention(states, "log_softmax.mlp.layer0.bias", kept)
    weights[OUTPUT] = weights["transf_decoder._embedding.token_embedding.weight"]
    return weights


def archive(
    path: Path, changes: Changes = None, weights: Changes = None, name: str = "canary2"
) -> Path:
    """A .nemo archive of a case, with changes of its config and of its weights."""
    case = known.attention_cases()[name]
    config = changed(known.archive_config(case), changes or {})
    kept = without_gone(weights_of(name) | (weights or {}))
    return known.write_archive(path, case, kept, config)


def folder(path: Path, changes: Changes = None) -> Path:
    """A Hugging Face folder, with changes of its config.json."""
    states = zeros(golden("transformers_attention")["canary2"]["shapes"])
    weights = known.fill_attention(states, "proj_out.bias", ("proj_out.weight",))
    known.write_canary(path, known.CASE, weights)
    edit(path / "config.json", changes or {})
    return path
