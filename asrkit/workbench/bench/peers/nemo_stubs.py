"""NeMo's modules without the packages that they name and do not use here.

NeMo's `__init__` files import lightning, hydra and some forty packages more. Here its packages are
put into `sys.modules` as empty modules with their folders as `__path__`, and what nothing provides
is a module of empty classes, so that a single file of NeMo can be imported. It is used by the
workers of this folder, in processes of their own whose `sys.path` holds it; nothing of asrkit is
imported here.
"""

import sys
import types
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

CLASSES = "nemo.core.classes"
ASR = "nemo.collections.asr"
DECODER_PACKAGES = (
    "nemo",
    "nemo.core",
    "nemo.core.utils",
    "nemo.utils",
    "nemo.collections",
    "nemo.collections.common",
    "nemo.collections.common.parts",
    ASR,
    f"{ASR}.modules",
    f"{ASR}.parts",
    f"{ASR}.parts.submodules",
    f"{ASR}.parts.utils",
)
LOSS_PACKAGES = (
    "nemo",
    "nemo.core",
    CLASSES,
    "nemo.collections",
    ASR,
    f"{ASR}.losses",
    f"{ASR}.parts",
    f"{ASR}.parts.numba",
)
UNUSED_BY_DECODERS = (
    f"{ASR}.parts.context_biasing",
    f"{ASR}.parts.context_biasing.biasing_multi_model",
    f"{ASR}.parts.submodules.ngram_lm",
    f"{ASR}.parts.utils.adapter_utils",
)
UNUSED_BY_ENCODERS = (
    f"{ASR}.models",
    f"{ASR}.parts.mixins",
    f"{ASR}.parts.mixins.streaming",
    f"{ASR}.parts.submodules.adapters",
)


class Stub(types.ModuleType):
    """A module in which every other name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def cuda_python() -> bool:
    """Whether there is a GPU, and cuda-python as new as NeMo's graphs ask for."""
    if not torch.cuda.is_available():
        return False
    try:
        from cuda.bindings import __version__
    except ImportError:
        return False
    return tuple(map(int, __version__.split(".")[:2])) >= (12, 6)


def stub_nemo() -> None:
    """Let NeMo's decoders be imported without lightning, hydra, adapters and fusion models.

    Raises:
        ModuleNotFoundError: no folder of sys.path holds NeMo.
    """
    _add_packages(DECODER_PACKAGES)
    _add_stubs(UNUSED_BY_DECODERS)
    registry = types.SimpleNamespace(get_registered_adapter=_same)
    config = types.SimpleNamespace(structured=_same)
    adapters = type("AdapterModuleMixin", (), {"is_adapter_available": lambda self: False})
    _fill("omegaconf", OmegaConf=config, ListConfig=list)
    _fill(
        CLASSES,
        typecheck=lambda: _same,
        Typing=type("Typing", (), {}),
        adapter_mixins=registry,
    )
    _fill(f"{CLASSES}.exportable")
    _fill("nemo.core.neural_types")
    _fill(f"{CLASSES}.mixins", AdapterModuleMixin=adapters)
    _fill(
        "nemo.core.utils.optional_libs",
        CUDA_PYTHON_AVAILABLE=cuda_python(),
        cuda_python_required=_same,
    )
    _fill("nemo.core", NeuralModule=nn.Module)
    logging = types.SimpleNamespace(info=_same, warning=_same, debug=_same)
    _fill("nemo.utils", logging=logging)


def stub_nemo_encoder() -> None:
    """Let NeMo's ConformerEncoder be imported without adapters, streaming and export."""
    stub_nemo()
    _add_stubs(UNUSED_BY_ENCODERS)
    access = type("AccessMixin", (), {"is_access_enabled": lambda self, guid=None: False})
    adapters = type("AttentionAdapterModuleMixin", (), {"is_adapter_available": lambda self: False})
    registry = _adapters()
    settings = type("Settings", (types.SimpleNamespace,), {"drop_extra_pre_encoded": 0})
    _fill(f"{CLASSES}.common", typecheck=lambda: lambda method: method)
    _fill(f"{CLASSES}.module", NeuralModule=nn.Module)
    _fill(f"{CLASSES}.mixins", AccessMixin=access, adapter_mixins=registry)
    _fill(f"{ASR}.models.configs", CacheAwareStreamingConfig=settings)
    _fill(
        f"{ASR}.parts.submodules.adapters.attention_adapter_mixin",
        AttentionAdapterModuleMixin=adapters,
    )
    _fill("nemo.collections.common.parts.utils", activation_registry={})
    _fill("omegaconf", open_dict=nullcontext)
    # it asks about CUDA only
    _fill("nemo.utils", avoid_float16_autocast_context=nullcontext)


def stub_nemo_losses() -> None:
    """Let NeMo's losses be imported, which want nothing but a base class.

    Raises:
        ModuleNotFoundError: no folder of sys.path holds NeMo.
    """
    if "nemo" not in sys.modules:
        _add_packages(LOSS_PACKAGES)
        _fill(CLASSES, Loss=nn.Module)


def _adapters() -> types.SimpleNamespace:
    """What stands for the module of adapters, of which there are none."""
    return types.SimpleNamespace(
        AdapterModuleMixin=type("AdapterModuleMixin", (), {}),
        get_registered_adapter=lambda kind: None,
        register_adapter=lambda **_: None,
    )


def _add_packages(names: Iterable[str]) -> None:
    """Empty modules with NeMo's folders as their paths."""
    root = _root()
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module


def _add_stubs(names: Iterable[str]) -> None:
    for name in names:
        sys.modules.setdefault(name, Stub(name))


def _fill(module: str, **contents: Any) -> None:
    """Put names into a module, which is a Stub if there is none."""
    _add_stubs([module])
    vars(sys.modules[module]).update(contents)


def _root() -> Path:
    """The folder of sys.path that holds NeMo."""
    for folder in map(Path, sys.path):
        if (folder / "nemo").is_dir():
            return folder
    raise ModuleNotFoundError("No module named 'nemo'")


def _same(value: Any = None) -> Any:
    """A decorator, or any other function, that changes nothing."""
    return value
