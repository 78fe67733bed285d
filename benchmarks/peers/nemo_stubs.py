"""NeMo's modules without the packages that they import and do not need here.

NeMo's `__init__` files import lightning, hydra and some forty other packages. To import single
files of NeMo, its packages become empty modules in `sys.modules` whose `__path__` is their folder,
and missing modules become modules of empty classes. The workers of this folder call it.
"""

import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

PACKAGES = (
    "nemo",
    "nemo.core",
    "nemo.core.utils",
    "nemo.utils",
    "nemo.collections",
    "nemo.collections.common",
    "nemo.collections.common.parts",
    "nemo.collections.asr",
    "nemo.collections.asr.losses",
    "nemo.collections.asr.modules",
    "nemo.collections.asr.parts",
    "nemo.collections.asr.parts.numba",
    "nemo.collections.asr.parts.submodules",
    "nemo.collections.asr.parts.utils",
)
UNUSED = (
    "einops",
    "nemo.core.classes.exportable",
    "nemo.core.neural_types",
    "nemo.collections.asr.models",
    "nemo.collections.asr.parts.context_biasing",
    "nemo.collections.asr.parts.context_biasing.biasing_multi_model",
    "nemo.collections.asr.parts.mixins",
    "nemo.collections.asr.parts.mixins.streaming",
    "nemo.collections.asr.parts.submodules.adapters",
    "nemo.collections.asr.parts.submodules.ngram_lm",
    "nemo.collections.asr.parts.utils.adapter_utils",
)


class Stub(types.ModuleType):
    """A module in which every other name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stub_nemo() -> None:
    """Let NeMo's losses, decoders and encoder be imported without lightning, hydra, adapters,
    fusion models, streaming and export.

    Raises:
        ModuleNotFoundError: no folder of sys.path holds NeMo.
    """
    if "nemo" in sys.modules:
        return
    folders = [folder for folder in map(Path, sys.path) if (folder / "nemo").is_dir()]
    if not folders:
        raise ModuleNotFoundError("No module named 'nemo'")
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(folders[0] / name.replace(".", "/"))]
        sys.modules[name] = package
    for name in UNUSED:
        sys.modules[name] = Stub(name)
    for name, contents in _used().items():
        module = sys.modules.setdefault(name, Stub(name))
        vars(module).update(contents)


def _used() -> dict[str, dict[str, Any]]:
    """Replacements of the names that NeMo uses, by module."""
    access = type("AccessMixin", (), {"is_access_enabled": lambda self, guid=None: False})
    adapter = type("AdapterModuleMixin", (), {"is_adapter_available": lambda self: False})
    adapters = types.SimpleNamespace(AdapterModuleMixin=adapter, get_registered_adapter=_same)
    streaming = type("Settings", (types.SimpleNamespace,), {"drop_extra_pre_encoded": 0})
    return {
        "omegaconf": {
            "ListConfig": list,
            "OmegaConf": types.SimpleNamespace(structured=_same),
            "open_dict": nullcontext,
        },
        "nemo.core": {"NeuralModule": nn.Module},
        "nemo.core.classes": {
            "Loss": nn.Module,
            "Typing": type("Typing", (), {}),
            "adapter_mixins": adapters,
            "typecheck": lambda: _same,
        },
        "nemo.core.classes.common": {"typecheck": lambda: _same},
        "nemo.core.classes.mixins": {
            "AccessMixin": access,
            "AdapterModuleMixin": adapter,
            "adapter_mixins": adapters,
        },
        "nemo.core.classes.module": {"NeuralModule": nn.Module},
        "nemo.core.utils.optional_libs": {
            "CUDA_PYTHON_AVAILABLE": cuda_python(),
            "cuda_python_required": _same,
        },
        "nemo.utils": {
            "avoid_float16_autocast_context": nullcontext,  # it concerns CUDA only
            "logging": types.SimpleNamespace(info=_same, warning=_same, debug=_same),
        },
        "nemo.collections.asr.models.configs": {"CacheAwareStreamingConfig": streaming},
        "nemo.collections.asr.parts.submodules.adapters.attention_adapter_mixin": {
            "AttentionAdapterModuleMixin": adapter
        },
    }


def cuda_python() -> bool:
    """Whether there is a GPU, and cuda-python as new as NeMo's graphs ask for."""
    if not torch.cuda.is_available():
        return False
    try:
        from cuda.bindings import __version__
    except ImportError:
        return False
    return tuple(map(int, __version__.split(".")[:2])) >= (12, 6)


def _same(value: Any = None) -> Any:
    """A decorator or other function that does nothing."""
    return value
