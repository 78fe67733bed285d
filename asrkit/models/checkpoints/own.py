"""asrkit's own checkpoints: safetensors weights, with configs and tokenizer in the header."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.files import atomic
from asrkit.memory import map_file
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.conv import ConvConfig
from asrkit.models.ctc import CTCConfig
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig, Stage
from asrkit.models.lstm import LSTMEncoderConfig
from asrkit.models.presets import ModelConfig
from asrkit.models.transducer import LSTMConfig, StatelessConfig, TransducerConfig
from asrkit.models.whisper import WhisperEncoderConfig
from asrkit.shapes import expect
from asrkit.text import Tokenizer, dump_tokenizer, load_tokenizer

Values = dict[str, Any]  # by name: a section of a config, arguments, notes
Weights = dict[str, Tensor]  # by name
# The result of every reader: config, weights by asrkit's names, tokenizer, arguments of
# FeatureConfig, notes.
Contents = tuple[ModelConfig, Weights, Tokenizer, Values, Values]

_KINDS = {
    kind.__name__: kind
    for kind in (
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
}


def is_config(value: object) -> bool:
    """Whether `value` is a config that these files can hold."""
    return type(value) in _KINDS.values()


def config_to_dict(config: Any) -> Any:
    """Fields of a config dataclass, nested, each with its `kind`; other values as they are."""
    if isinstance(config, tuple | list):
        return [config_to_dict(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    values = {name: config_to_dict(value) for name, value in vars(config).items()}
    return {"kind": type(config).__name__, **values}


def config_from_dict(values: Any) -> Any:
    """The config that `config_to_dict` wrote; sequences become lists.

    Raises:
        ValueError: A kind or a field is unknown; it is named.
    """
    if isinstance(values, list):
        return [config_from_dict(item) for item in values]
    if not isinstance(values, dict):
        return values
    fields = {name: config_from_dict(value) for name, value in values.items()}
    fields.pop("residual", None)  # a field of a Jasper in files of asrkit 0.2
    try:
        return _KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"model: no config of this asrkit ({error!s:.300}). Is it of a newer one?"
        ) from None


def write(path: Path, contents: Contents) -> None:
    """Write `contents` to `path` (.safetensors) atomically; an OSError names the path."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config, weights, tokenizer, features, notes = contents
    header = {
        "model": config_to_dict(config),
        "features": features,
        "tokenizer": dump_tokenizer(tokenizer),
        "notes": notes,
    }
    expect(isinstance(notes, dict), "notes", "a dict", type(notes).__name__)
    try:
        text = json.dumps(header, default=_plain)
    except TypeError as error:  # of a key
        raise ValueError(f"notes: expected dicts with texts as keys ({error}).") from None
    with atomic(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # the account's default for new files
        try:
            save_file(weights, str(temporary), metadata={"asrkit": text})
        except SafetensorError as error:
            reason = f"Is the disk full? ({error})"
            raise OSError(f"{path} cannot be written. {reason}") from None
        temporary.chmod(mode)  # safetensors makes files unreadable for other accounts


def _plain(value: Any) -> Any:
    """A number of NumPy as Python's, for JSON; ValueError for any other value."""
    is_number = isinstance(value, np.generic)
    expect(is_number, "config, features or notes", "values of JSON", f"{value!r:.80}")
    return value.item()


def read_safetensors(path: Path) -> tuple[Weights, dict[str, str]]:
    """Tensors by name, which stay on disk until they are used, and the texts of the header."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:  # checks the header
        texts = file.metadata() or {}
        data = map_file(path)
        start = 8 + int.from_bytes(data[:8], "little")  # the length of the header, then the header
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        examples = {entry["dtype"]: name for name, entry in header.items()}
        dtypes = {code: file.get_tensor(name).dtype for code, name in examples.items()}
    weights = {}
    for name, entry in header.items():
        offset = start + entry["data_offsets"][0]
        weights[name] = tensor_at(data, offset, dtypes[entry["dtype"]], entry["shape"])
    return weights, texts


def tensor_at(data: Any, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor at `offset` of a mapped file; its values stay in the file until they are used."""
    count = math.prod(shape)
    if not count:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
    return flat.view(shape).detach()  # detached, it does not keep the file mapped by its base


def read(path: Path) -> Contents:
    """Contents of a file from `write`."""
    weights, texts = read_safetensors(path)
    expect(
        "asrkit" in texts,
        "model",
        "a checkpoint written by asrkit",
        f"{path.name} without its header",
    )
    header = json.loads(texts["asrkit"])
    config = config_from_dict(header["model"])
    tokenizer = load_tokenizer({**header["tokenizer"]})  # a dict, so no path is opened
    notes = header["notes"] or {}
    expect(isinstance(notes, dict), "notes", "an object", type(notes).__name__)
    return config, weights, tokenizer, header["features"], notes
