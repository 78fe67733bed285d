"""Which compilers of kernels can be had here, and what their kernels are asked for. Importing this file tries none."""

import functools
import os
import shutil
import sysconfig
from importlib import import_module
from pathlib import Path

import torch

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"  # Numba reads it once as well, when it is imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MODULES = {"numba_cuda": ("numba_cuda", "numba.cuda", "numba.cuda.core.config"), "triton": ("triton", "triton.language")}


@functools.cache
def lacks(package: str) -> str:
    """Why the kernels written with "numba_cuda" or "triton" cannot be had here; "" where they can. No GPU is asked for.

    The package is really imported, and numba_cuda compiles a small kernel too, for it finds NVVM or not only then. Tried once in
    a process: a package that is there and broken is named with what it raised, and costs nothing but its own kernels.
    """
    try:
        for name in MODULES[package]:
            import_module(name)
        if package == "numba_cuda" and not SIMULATED:
            from numba import cuda

            cuda.compile(_store_one, "void(float32[:])", cc=(8, 0), device=False, abi="numba")
    except ModuleNotFoundError as error:
        return f"no package {error.name}" if error.name == package else f"ModuleNotFoundError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _store_one(x):
    x[0] = 1


def toolkit() -> Path | None:
    """Folder of a CUDA toolkit with NVVM, by which Numba compiles: $CUDA_HOME, nvcc's, that of NVIDIA's wheels, the usual one."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(named)
    nvcc = shutil.which("nvcc")
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    found = [Path(nvcc).resolve().parents[1]] if nvcc else []
    found += [wheels / "cu13", wheels / "cuda_nvcc", Path("/usr/local/cuda")]
    return next((folder for folder in found if [*folder.glob("nvvm/libdevice/libdevice*.bc")]), None)


def tf32_asked() -> bool:
    """Whether products of float32 on CUDA may be taken in TF32, by whichever of torch's settings that was said.

    `allow_tf32` and `get_float32_matmul_precision` raise where a newer setting was used; this one follows them all.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
