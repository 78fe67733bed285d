"""asrkit's own checkpoint: safetensors weights, with configs and tokenizer in the file's header."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.files import atomic
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.encoders import ConvConfig
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig, Stage
from asrkit.models.lstm import LSTMEncoderConfig
from asrkit.models.presets import ModelConfig
from asrkit.models.transducer import CTCConfig, LSTMConfig, StatelessConfig, TransducerConfig
from asrkit.models.whisper import WhisperEncoderConfig
from asrkit.shapes import expect
from asrkit.text import Tokenizer, dump_tokenizer, load_tokenizer

# What every reader returns: config, weights by asrkit's names, tokenizer, arguments of
# FeatureConfig, notes.
Contents = tuple[ModelConfig, dict[str, Tensor], Tokenizer, dict[str, Any], dict[str, Any]]
NEWER = "Is the checkpoint from a newer asrkit?"

_CONFIGS = (
    ConvConfig,
    FastConformerConfig,
    LSTMEncoderConfig,
    JasperConfig,
    Stage,
    WhisperEncoderConfig,
    StatelessConfig,
    LSTMConfig,
    TransducerConfig,
    CTCConfig,
    AEDConfig,
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in _CONFIGS}


def config_to_dict(config: Any) -> dict[str, Any]:
    """Fields of a config dataclass, nested, each with its `kind`."""
    values: dict[str, Any] = {"kind": type(config).__name__}
    for field in dataclasses.fields(config):
        values[field.name] = _to_plain(getattr(config, field.name))
    return values


def _to_plain(value: Any) -> Any:
    """A field's value, with configs as dicts, those in a sequence too."""
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    return value


def _from_plain(value: Any) -> Any:
    """The inverse of `_to_plain`, but for sequences, which become lists."""
    if isinstance(value, dict):
        return config_from_dict(value)
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    return value


def config_from_dict(values: dict[str, Any]) -> Any:
    """The config that `config_to_dict` wrote.

    Raises:
        ValueError: A kind or a field is unknown; it is named.
    """
    kind = str(values.get("kind"))
    expect(kind in _KINDS, "kind", f"one of {sorted(_KINDS)}", repr(kind), NEWER)
    config_class = _KINDS[kind]
    fields = {}
    for name, value in values.items():
        if name != "kind":
            fields[name] = _from_plain(value)
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = fields.keys() - known
    expect(not unknown, kind, "known fields", sorted(unknown), NEWER)
    return config_class(**fields)


def write(path: Path, contents: Contents) -> None:
    """Write `contents` to `path` (.safetensors), atomically."""
    from safetensors.torch import save_file

    config, weights, tokenizer, features, notes = contents
    header = {
        "model": config_to_dict(config),
        "features": features,
        "tokenizer": dump_tokenizer(tokenizer),
        "notes": notes,
    }
    with atomic(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # what this account gives its files
        save_file(weights, str(temporary), metadata={"asrkit": json.dumps(header)})
        temporary.chmod(mode)  # safetensors keeps others from reading


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, which stay on disk until they are used, and the header's texts."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return weights, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"model: {path.name} is not a safetensors file ({error}). Pass a .safetensors file, a "
            ".nemo file or the folder of a model."
        ) from None


def read(path: Path) -> Contents:
    """Contents of a file that `write` made."""
    weights, texts = read_safetensors(path)
    written = "asrkit" in texts
    expect(written, "model", "a checkpoint written by asrkit", f"{path.name} without its header")
    header = json.loads(texts["asrkit"])
    contents = header["tokenizer"]
    held = isinstance(contents, dict)
    got = repr(contents)[:80]
    expect(held, "tokenizer", "the contents of one", got, "Do not trust the file.")
    config = config_from_dict(header["model"])
    known = isinstance(config, ModelConfig)
    got = f"{path.name} of a {type(config).__name__}"
    expect(known, "model", "a header of a transducer, CTC or attention model", got)
    if isinstance(config, TransducerConfig) and "predictor_projection.weight" in weights:
        # Files of before this layer had a bias: zeros change nothing.
        bias = torch.zeros(len(weights["predictor_projection.weight"]))
        weights.setdefault("predictor_projection.bias", bias)
    return config, weights, load_tokenizer(contents), header["features"], header["notes"] or {}
