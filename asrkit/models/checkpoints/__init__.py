"""Checkpoints: one door for asrkit's own files, NeMo's `.nemo` archives and Hugging Face folders.
No pickled code is ever read.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.features import FeatureConfig
from asrkit.models.checkpoints import own
from asrkit.models.checkpoints.own import config_from_dict, config_to_dict
from asrkit.models.transducer import (
    CTCConfig,
    CTCModel,
    TransducerConfig,
    TransducerModel,
    make_model,
)
from asrkit.shapes import expect
from asrkit.text import Tokenizer

__all__ = ["Checkpoint", "config_from_dict", "config_to_dict", "load_checkpoint", "save_checkpoint"]


class Checkpoint(NamedTuple):
    """A model ready to use, with what it was trained on and how."""

    model: TransducerModel | CTCModel
    tokenizer: Tokenizer
    features: dict[str, Any]  # arguments of FeatureConfig
    notes: dict[str, Any]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path` (.safetensors), atomically; ValueError if its parts do not fit
    one another.
    """
    _fit(checkpoint.model.config, checkpoint.tokenizer, checkpoint.features, "the checkpoint")
    weights = {
        name: value.detach().cpu().contiguous()
        for name, value in checkpoint.model.state_dict().items()
    }
    _compare(
        _empty(checkpoint.model.config).state_dict(),
        weights,
        "model",
        "Save a model before it is optimized.",
    )
    own.write(Path(path), (checkpoint.model.config, weights, *checkpoint[1:]))


def load_checkpoint(
    path: Path | str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """The model of `path` in eval mode, its weights on `device` in `dtype` (counters stay whole
    numbers).

    path: asrkit's own .safetensors file or the folder that holds `model.safetensors`; a NeMo
    `.nemo` archive; a Hugging Face folder (config.json beside the weights). ValueError says in one
    line what is wrong, missing or not supported.
    """
    expect(dtype.is_floating_point, "dtype", "a floating-point dtype", dtype)
    path = Path(path)
    folder = path.is_dir() and (path / "config.json").is_file()
    if path.is_dir() and not folder:
        path = path / "model.safetensors"
    wanted = "a .safetensors file or a training folder, a .nemo file, or a Hugging Face folder"
    expect(path.is_file() or folder, "model", wanted, repr(str(path)), "Make one: asrkit train.")
    if folder:
        from asrkit.models.checkpoints import huggingface

        contents = huggingface.read(path)
    elif path.suffix == ".nemo":
        from asrkit.models.checkpoints import nemo

        contents = nemo.read(path)
    else:
        contents = own.read(path)
    config, weights, tokenizer, features, notes = contents
    _fit(config, tokenizer, features, path.name)
    layers = max(config.encoder.layers, getattr(getattr(config, "predictor", None), "layers", 0))
    expect(
        layers <= len(weights),
        "model",
        f"at most {len(weights)} layers, the number of its tensors",
        layers,
    )
    model = _empty(config)
    _compare(model.state_dict(), weights, path.name, "Is it whole, and of this asrkit?")
    moved = dict[str, Tensor]()
    for name, wanted in model.state_dict().items():  # one by one, so that all are in memory once
        kind = dtype if wanted.is_floating_point() else wanted.dtype
        same = weights[name].is_floating_point() == wanted.is_floating_point()
        expect(same, name, "floating-point weights, whole counters", weights[name].dtype)
        # Tensors of safetensors are still mapped from the file: what changes it would change the
        # model, and they are not aligned.
        moved[name] = weights.pop(name).to(device, kind, copy=path.suffix != ".nemo")
    model.load_state_dict(moved, assign=True)
    return Checkpoint(model.eval(), tokenizer, features, notes)


def _fit(
    config: TransducerConfig | CTCConfig, tokenizer: Tokenizer, features: dict[str, Any], name: str
) -> None:
    expect(
        tokenizer.vocab_size == config.vocab_size,
        "tokenizer",
        f"{config.vocab_size} tokens",
        tokenizer.vocab_size,
    )
    try:
        bins = FeatureConfig(**features).bins
    except TypeError as error:
        raise ValueError(
            f"features: those of {name} are no dict of settings of FeatureConfig ({error})."
        ) from None
    expect(
        bins == config.encoder.bins,
        "features",
        f"{config.encoder.bins} bins, as the encoder has",
        bins,
    )


def _empty(config: TransducerConfig | CTCConfig) -> TransducerModel | CTCModel:
    """The model of `config` without memory for its weights."""
    with torch.device("meta"):
        return make_model(config)


def _compare(wanted: dict[str, Tensor], weights: dict[str, Tensor], name: str, remedy: str) -> None:
    missing = sorted(wanted.keys() - weights.keys())
    unknown = sorted(weights.keys() - wanted.keys())
    named = f"missing {_few(missing)}, unknown {_few(unknown)}"
    expect(not missing and not unknown, "model", "weights of its config", named, remedy)
    shapes = {key: (tuple(weights[key].shape), tuple(value.shape)) for key, value in wanted.items()}
    other = [
        f"{key} {found}, not {shape}" for key, (found, shape) in shapes.items() if found != shape
    ]
    expect(not other, "model", f"the header of {name} to be of its weights", _few(other))


def _few(names: list[str]) -> str:
    return str(names[:5])[:300] + (f" and {len(names) - 5} more" if len(names) > 5 else "")
