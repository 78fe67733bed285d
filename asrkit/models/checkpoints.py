"""One file a model: safetensors weights whose header carries the configs and the tokenizer. No pickled code is ever read."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asrkit.models.encoders import ConvConfig, FastConformerConfig
from asrkit.models.transducer import CTCConfig, CTCModel, LSTMConfig, StatelessConfig, TransducerConfig, TransducerModel
from asrkit.records import atomic
from asrkit.shapes import expect
from asrkit.text import Tokenizer, dump_tokenizer, load_tokenizer

_CONFIGS = (ConvConfig, FastConformerConfig, StatelessConfig, LSTMConfig, TransducerConfig, CTCConfig)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in _CONFIGS}


class Checkpoint(NamedTuple):
    """A model ready to use, with what it was trained on and how."""

    model: TransducerModel | CTCModel
    tokenizer: Tokenizer
    features: dict[str, Any]  # arguments of FeatureConfig
    notes: dict[str, Any]


def config_to_dict(config: Any) -> dict[str, Any]:
    """Fields of a config dataclass, nested, each with its `kind`."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    nested = {name: config_to_dict(v) if dataclasses.is_dataclass(v) else v for name, v in values.items()}
    return {"kind": type(config).__name__, **nested}


def config_from_dict(values: dict[str, Any]) -> Any:
    """The config that `config_to_dict` wrote; an unknown kind or field is an error that names it."""
    kind = str(values.get("kind"))
    expect(kind in _KINDS, "kind", f"one of {sorted(_KINDS)}", repr(kind), "Is the checkpoint from a newer asrkit?")
    fields = {name: config_from_dict(v) if isinstance(v, dict) else v for name, v in values.items() if name != "kind"}
    unknown = set(fields) - {f.name for f in dataclasses.fields(_KINDS[kind])}
    expect(not unknown, kind, "known fields", sorted(unknown), "Is the checkpoint from a newer asrkit?")
    return _KINDS[kind](**fields)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path` (.safetensors), atomically."""
    from safetensors.torch import save_file

    model, tokenizer, features, notes = checkpoint
    header = {
        "model": config_to_dict(model.config), "features": features,
        "tokenizer": dump_tokenizer(tokenizer), "notes": notes,
    }  # fmt: skip
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    with atomic(Path(path)) as temporary:
        save_file(weights, str(temporary), metadata={"asrkit": json.dumps(header)})


def load_checkpoint(path: Path | str, *, device: str | torch.device = "cpu") -> Checkpoint:
    """The model of a .safetensors file (or of the folder that holds `model.safetensors`), in eval mode."""
    from safetensors import SafetensorError, safe_open

    path = Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)
    expect(path.is_file(), "model", "a .safetensors file or a training folder", repr(str(path)), "Make one: asrkit train.")
    try:
        with safe_open(str(path), "pt") as file:
            header = (file.metadata() or {}).get("asrkit", "")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"model: {path.name} is not a safetensors file ({error}).") from None
    expect(bool(header), "model", "a checkpoint written by asrkit", f"{path.name} without its header")
    try:
        config, *rest = (json.loads(header)[key] for key in ("model", "tokenizer", "features", "notes"))
        config, (tokenizer, features, notes) = config_from_dict(config), (load_tokenizer(rest[0]), *rest[1:])
        model = (TransducerModel if isinstance(config, TransducerConfig) else CTCModel)(config)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except (KeyError, TypeError, AttributeError, RuntimeError, json.JSONDecodeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"model: the header of {path.name} is damaged or not of its weights ({why:.300}).") from None
    expect(not missing and not unexpected, "model", "weights of its config", f"missing {missing}, unknown {unexpected}")
    expect(tokenizer.vocab_size == config.vocab_size, "tokenizer", f"{config.vocab_size} tokens", tokenizer.vocab_size)
    return Checkpoint(model.to(device).eval(), tokenizer, features, notes)
