"""Checkpoints: `load_checkpoint` reads asrkit's own files, NeMo's `.nemo` archives, folders of
Hugging Face and of CTranslate2, and `.pt` files of Jasper's published training code.

No pickled code is ever run.
"""

import tarfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.features import FeatureConfig
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import own
from asrkit.models.checkpoints.own import config_from_dict, config_to_dict
from asrkit.models.common import own_weights, without_memory
from asrkit.models.presets import Model, make_model
from asrkit.models.prompts import PromptFormat
from asrkit.shapes import expect
from asrkit.text import Tokenizer

__all__ = ["Checkpoint", "config_from_dict", "config_to_dict", "load_checkpoint", "save_checkpoint"]


class Checkpoint(NamedTuple):
    """A model with all that it needs to transcribe.

    Args:
        model: The model.
        tokenizer: Turns the model's tokens into text.
        features: Arguments of the `FeatureConfig` that the model was trained on.
        notes: The model's source and how it was trained. `max_symbols` is for greedy decoding. An
            encoder-decoder model may have `prompt`, which `PromptFormat.from_notes` reads, and
            `suppressed`, the arguments `always` and `first` of `asrkit.decoders.Suppressing`.
    """

    model: Model
    tokenizer: Tokenizer
    features: dict[str, Any]
    notes: dict[str, Any]


def save_checkpoint(path: Path | str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a .safetensors file, whole or not at all.

    Args:
        path: The file, whose name ends in .safetensors.
        checkpoint: Model, tokenizer, features and notes. A model may be wrapped by DataParallel,
            DistributedDataParallel, AveragedModel or torch.compile.

    Raises:
        ValueError: The name has another suffix, the model is not one of asrkit's or was optimized,
            or the parts do not fit together.
        OSError: The file cannot be written, as on a full disk.
    """
    path = Path(path)
    expect(path.suffix == ".safetensors", "path", "a .safetensors file", repr(path.name))
    model, tokenizer, features, notes = checkpoint
    model = _unwrapped(model)
    is_ours = own.is_config(getattr(model, "config", None))
    remedy = "Save the state_dict of another module with safetensors."
    expect(is_ours, "checkpoint", "a model of asrkit.models", type(model).__name__, remedy)
    state = model.state_dict()
    weights = {name: weight.detach().cpu().contiguous() for name, weight in state.items()}
    last = {weight.data_ptr(): name for name, weight in weights.items()}
    for name, weight in weights.items():
        if last[weight.data_ptr()] != name:  # tied to another one: the file has both
            weights[name] = weight.clone()
    contents = (model.config, weights, tokenizer, features, notes)
    _load(_skeleton(contents), weights, "model", "Save a model before it is optimized.")
    own.write(path, contents)


def _unwrapped(model: nn.Module) -> Any:
    """The model within torch.compile, DataParallel, DistributedDataParallel or AveragedModel."""
    inner: Any = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return model if inner is None else _unwrapped(inner)


def load_checkpoint(
    path: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> Checkpoint:
    """A checkpoint, its model in eval mode.

    Args:
        path: asrkit's own .safetensors file, or a folder with `model.safetensors`; a NeMo `.nemo`
            archive; a Hugging Face folder (config.json and weights); a CTranslate2 folder, as
            faster-whisper uses (config.json and model.bin); a `.pt` file of Jasper's published
            training code, of which the averaged weights are loaded if there are any.
        device: Device of the weights.
        dtype: Floating-point dtype of the weights. Counters stay integers. None, on a CPU: that of
            the file, in which the weights stay until they are used. Neither may change: a weight
            that is edited gets the value of the file again. `optimize(model, dtype=...)` then
            reads one layer after the other.

    Raises:
        ValueError: Something is damaged, missing or not supported; the message says what.
    """
    from asrkit.models.checkpoints import huggingface, jasper, nemo

    kind = torch.device(device).type
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    stays = dtype is None and kind == "cpu"
    expect(floating or stays, "dtype", "a floating-point dtype, as torch.float32", repr(dtype))
    expect(kind != "meta", "device", "one with memory for the weights", repr(kind))
    path = Path(path)
    folder = (path / "config.json").is_file()
    if path.is_dir() and not folder:
        path = path / "model.safetensors"
    expect(
        path.is_file() or folder,
        "model",
        "a .safetensors, .nemo or Jasper's .pt file, or a folder of a model",
        f"no such file: {str(path)!r}",
        "Make one: asrkit train.",
    )
    readers = {".nemo": nemo.read, ".pt": jasper.read}
    read = huggingface.read if folder else readers.get(path.suffix, own.read)
    try:
        contents = read(path)
        model = _skeleton(contents)
    except Exception as error:  # a file with unexpected contents may raise anything
        if type(error) is ValueError and _is_ours(str(error), path.name):
            raise
        why = " ".join(_damage(error).split())
        remedy = "Pass a .safetensors file, a .nemo file or the folder of a model."
        message = f"model: {path.name} is damaged ({why:.300}), or asrkit does not know its model."
        raise ValueError(f"{message} {remedy}") from None
    _, weights, tokenizer, features, notes = contents
    state = model.state_dict()
    for name, weight in weights.items():
        fits = state.get(name, weight).is_floating_point() == weight.is_floating_point()
        wanted = "floating-point weights, whole counters"
        expect(fits and not weight.is_complex(), name, wanted, weight.dtype)
    _load(model, weights, path.name, "Is it whole, and of this asrkit?")
    weights.clear()
    if dtype is None:
        model.requires_grad_(False)  # a trained weight's page would be read from the file again
    else:
        own_weights(model, dtype, device)
    return Checkpoint(model.eval(), tokenizer, features, notes)


def _is_ours(message: str, file: str) -> bool:
    """Whether the message of a ValueError is asrkit's own, which names what is wrong."""
    return ": expected " in message or message.startswith(("model: ", "tokenizer: ", file))


def _damage(error: Exception) -> str:
    """What is wrong with a file whose reading raised `error`."""
    from safetensors import SafetensorError

    match error:
        case FileNotFoundError():
            return f"it has no {Path(str(error.filename)).name}"
        case KeyError():
            return f"it has no {error}"
        case EOFError():
            return "it is empty, or ends too early"
        case tarfile.TarError() | zlib.error():
            return f"it is not a whole tar archive: {error}"
        case SafetensorError():
            return f"it is not a whole .safetensors file: {error}"
    return f"{type(error).__name__}: {error}"


def _skeleton(contents: own.Contents) -> Model:
    """The model of `contents` without memory for its weights; ValueError if parts do not fit."""
    config, weights, tokenizer, features, notes = contents
    V = config.vocab_size
    if isinstance(config, AEDConfig):  # it also has tokens of prompts, and unused ones
        expect(tokenizer.vocab_size <= V, "tokenizer", f"at most {V} tokens", tokenizer.vocab_size)
        prompt = PromptFormat.from_notes(notes)
        if prompt is not None:
            highest = max(prompt.ids.values(), default=0)
            wanted = f"tokens below {V}, the size of the model's vocabulary"
            expect(highest < V, "prompt", wanted, highest)
            size = len(prompt.template)
            wanted = f"fewer tokens than the model's {config.most} positions"
            expect(size < config.most, "prompt", wanted, size)
    else:
        expect(tokenizer.vocab_size == V, "tokenizer", f"{V} tokens", tokenizer.vocab_size)
    unknown = features.keys() - FeatureConfig.__dataclass_fields__.keys()
    expect(not unknown, "features", "settings of FeatureConfig", sorted(unknown))
    bins = FeatureConfig(**features).bins
    expect(
        bins == config.encoder.bins,
        "features",
        f"{config.encoder.bins} bins, as the encoder has",
        bins,
    )
    parts = (config, config.encoder, getattr(config, "predictor", None))
    layers = max(getattr(part, "layers", 0) for part in parts)
    expect(
        layers <= len(weights),
        "model",
        f"at most {len(weights)} layers, the number of its tensors",
        layers,
    )
    with without_memory():
        return make_model(config)


def _load(model: Model, weights: dict[str, Tensor], name: str, remedy: str) -> None:
    """Load weights into a model without memory; ValueError unless names and shapes fit."""
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        why = " ".join(str(error).partition(":")[2].split())
        message = f"{name}: the weights do not fit its config ({why:.400}). {remedy}"
        raise ValueError(message) from None
