"""asrkit's own checkpoint: safetensors weights whose header carries the configs and the tokenizer."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.files import atomic
from asrkit.models.encoders import ConvConfig
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.transducer import CTCConfig, LSTMConfig, StatelessConfig, TransducerConfig
from asrkit.shapes import expect
from asrkit.text import Tokenizer, dump_tokenizer, load_tokenizer

Contents = tuple[
    TransducerConfig | CTCConfig, dict[str, Tensor], Tokenizer, dict[str, Any], dict[str, Any]
]
"""What every reader returns: config, weights by asrkit's names, tokenizer, arguments of FeatureConfig, notes."""

_CONFIGS = (
    ConvConfig,
    FastConformerConfig,
    StatelessConfig,
    LSTMConfig,
    TransducerConfig,
    CTCConfig,
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in _CONFIGS}


def config_to_dict(config: Any) -> dict[str, Any]:
    """Fields of a config dataclass, nested, each with its `kind`."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    nested = {
        name: config_to_dict(v) if dataclasses.is_dataclass(v) else v for name, v in values.items()
    }
    return {"kind": type(config).__name__, **nested}


def config_from_dict(values: dict[str, Any]) -> Any:
    """The config that `config_to_dict` wrote; an unknown kind or field is an error that names it."""
    kind = str(values.get("kind"))
    expect(
        kind in _KINDS,
        "kind",
        f"one of {sorted(_KINDS)}",
        repr(kind),
        "Is the checkpoint from a newer asrkit?",
    )
    fields = {
        name: config_from_dict(v) if isinstance(v, dict) else v
        for name, v in values.items()
        if name != "kind"
    }
    unknown = set(fields) - {f.name for f in dataclasses.fields(_KINDS[kind])}
    expect(
        not unknown, kind, "known fields", sorted(unknown), "Is the checkpoint from a newer asrkit?"
    )
    return _KINDS[kind](**fields)


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
        save_file(weights, str(temporary), metadata={"asrkit": json.dumps(header)})


def read(path: Path) -> Contents:
    """Contents of a file that `write` made; its weights stay on disk until they are used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            header = (file.metadata() or {}).get("asrkit", "")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"model: {path.name} is not a safetensors file ({error}).") from None
    expect(
        bool(header), "model", "a checkpoint written by asrkit", f"{path.name} without its header"
    )
    try:
        config, tokenizer, features, notes = (
            json.loads(header)[key] for key in ("model", "tokenizer", "features", "notes")
        )
        expect(
            isinstance(tokenizer, dict),
            "tokenizer",
            "the contents of one",
            repr(tokenizer)[:80],
            "Do not trust the file.",
        )
        config = config_from_dict(config)
        tokenizer = load_tokenizer(tokenizer)
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"model: the header of {path.name} is damaged ({why:.300}).") from None
    whole = isinstance(config, TransducerConfig | CTCConfig)
    expect(
        whole,
        "model",
        "a header of a transducer or CTC model",
        f"{path.name} of a {type(config).__name__}",
    )
    if (
        isinstance(config, TransducerConfig) and "predictor_projection.weight" in weights
    ):  # written before it had a bias: zero
        weights.setdefault(
            "predictor_projection.bias", torch.zeros(len(weights["predictor_projection.weight"]))
        )
    return config, weights, tokenizer, features, notes
