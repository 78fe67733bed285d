"""Checkpoints: `load_checkpoint` reads asrkit's own files, NeMo's `.nemo` archives, Hugging Face
folders, and `.pt` files of Jasper's published training code.

No pickled code is ever run.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.features import FeatureConfig
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import own
from asrkit.models.checkpoints.own import config_from_dict, config_to_dict
from asrkit.models.presets import Model, ModelConfig, make_model
from asrkit.models.prompts import PromptFormat
from asrkit.shapes import expect
from asrkit.text import Tokenizer

__all__ = ["Checkpoint", "config_from_dict", "config_to_dict", "load_checkpoint", "save_checkpoint"]

DAMAGES = (  # what reading a file raises whose parts are not those of its kind
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    UnicodeDecodeError,
    json.JSONDecodeError,
)


class Checkpoint(NamedTuple):
    """A model ready to use, with all that it needs.

    Args:
        model: The model.
        tokenizer: Turns its tokens into text.
        features: Arguments of the `FeatureConfig` that it was trained on.
        notes: Where it comes from and how it was trained; `max_symbols` for its greedy decoding;
            `prompt` of an encoder-decoder model, as `PromptFormat.from_notes` reads it, and
            `suppressed`, the arguments `always` and `first` of `asrkit.decoders.Suppressing`.
    """

    model: Model
    tokenizer: Tokenizer
    features: dict[str, Any]
    notes: dict[str, Any]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a .safetensors file, whole or not at all.

    Args:
        path: The file.
        checkpoint: Model, tokenizer, features and notes.

    Raises:
        ValueError: The parts do not fit one another, or the model was optimized.
    """
    model, tokenizer, features, notes = checkpoint
    _expect_fits(model.config, tokenizer, features, "the checkpoint")
    _expect_prompt_fits(model.config, notes)
    weights = {}
    for name, value in model.state_dict().items():
        weights[name] = value.detach().cpu().contiguous()
    remedy = "Save a model before it is optimized."
    _load(_without_memory(model.config), weights, "model", remedy)
    own.write(Path(path), (model.config, weights, tokenizer, features, notes))


def load_checkpoint(
    path: Path | str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """A checkpoint, its model in eval mode.

    Args:
        path: asrkit's own .safetensors file, or the folder that holds `model.safetensors`; a NeMo
            `.nemo` archive; a Hugging Face folder (config.json beside the weights); a `.pt` file of
            Jasper's published training code, whose averaged weights are taken where it has them.
        device: Where the weights are to lie.
        dtype: Floating-point dtype of the weights; counters stay whole numbers.

    Raises:
        ValueError: What is wrong, missing or not supported, in one line.
    """
    expect(dtype.is_floating_point, "dtype", "a floating-point dtype", dtype)
    path = Path(path)
    folder = path.is_dir() and (path / "config.json").is_file()
    if path.is_dir() and not folder:
        path = path / "model.safetensors"
    kinds = "a .safetensors file or a training folder, a .nemo file, or a Hugging Face folder"
    there = path.is_file() or folder
    expect(there, "model", kinds, f"no such file: {str(path)!r}", "Make one: asrkit train.")
    config, weights, tokenizer, features, notes = _read(path)
    _expect_fits(config, tokenizer, features, path.name)
    _expect_prompt_fits(config, notes)
    predictor = getattr(config, "predictor", None)
    layers = max(
        config.encoder.layers, getattr(predictor, "layers", 0), getattr(config, "layers", 0)
    )
    most = f"at most {len(weights)} layers, the number of its tensors"
    expect(layers <= len(weights), "model", most, layers)
    model = _without_memory(config)
    state = model.state_dict()
    moved = dict[str, Tensor]()
    for name in [*weights]:  # one by one, so that none is in memory twice
        weight = weights.pop(name)
        floating = weight.is_floating_point()
        same = name not in state or state[name].is_floating_point() == floating
        expect(same, name, "floating-point weights, whole counters", weight.dtype)
        to_dtype = dtype if floating else weight.dtype
        # Tensors of safetensors are still mapped from the file: what changes the file would change
        # the model, and they are not aligned.
        moved[name] = weight.to(device, to_dtype, copy=path.suffix != ".nemo")
    _load(model, moved, path.name, "Is it whole, and of this asrkit?")
    return Checkpoint(model.eval(), tokenizer, features, notes)


def _read(path: Path) -> own.Contents:
    """Contents of a Hugging Face folder, a `.nemo` archive, a `.pt` file or asrkit's own file."""
    from asrkit.models.checkpoints import huggingface, jasper, nemo

    readers = {".nemo": nemo.read, ".pt": jasper.read}
    read = huggingface.read if path.is_dir() else readers.get(path.suffix, own.read)
    try:
        return read(path)
    except DAMAGES as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "Or it is of a model that asrkit does not know."
        raise ValueError(f"model: {path.name} is damaged ({why:.300}). {remedy}") from None


def _expect_fits(
    config: ModelConfig, tokenizer: Tokenizer, features: dict[str, Any], name: str
) -> None:
    V = config.vocab_size
    if isinstance(config, AEDConfig):  # tokens of a prompt, and of nothing at all, come on top
        fits = tokenizer.vocab_size <= V
        expect(fits, "tokenizer", f"at most {V} tokens", tokenizer.vocab_size)
    else:
        expect(tokenizer.vocab_size == V, "tokenizer", f"{V} tokens", tokenizer.vocab_size)
    try:
        bins = FeatureConfig(**features).bins
    except TypeError as error:
        raise ValueError(
            f"features: those of {name} are no dict of settings of FeatureConfig ({error})."
        ) from None
    wanted = f"{config.encoder.bins} bins, as the encoder has"
    expect(bins == config.encoder.bins, "features", wanted, bins)


def _expect_prompt_fits(config: ModelConfig, notes: dict[str, Any]) -> None:
    """ValueError unless the prompt that notes hold, if any, is one of the model's."""
    if isinstance(config, AEDConfig):
        prompt = PromptFormat.from_notes(notes)
        if prompt is not None:
            prompt.expect_fits(config.vocab_size, config.most)


def _without_memory(config: ModelConfig) -> Model:
    """The model of `config` without memory for its weights; ValueError where there is none."""
    try:
        with torch.device("meta"):
            return make_model(config)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # of torch, for the last
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"model: no model has the settings of this file ({why}).") from None


def _load(model: Model, weights: dict[str, Tensor], name: str, remedy: str) -> None:
    """Give a model its weights; ValueError unless they have its names and shapes.

    Args:
        model: One without memory.
        weights: By name.
        name: Of the file, in errors.
        remedy: In errors.
    """
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        why = " ".join(str(error).partition(":")[2].split())
        message = f"{name}: the weights are not of its config ({why:.400}). {remedy}"
        raise ValueError(message) from None
