"""Numba's and Triton's compilers: which of them work here, and Numba's cache of kernels on disk.

Importing this file tries no compiler and does not touch a GPU.
"""

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Read once, as Numba and Triton themselves read them when they are imported.
JIT_OFF = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")  # CUDA kernels, on a CPU
# What kernels import. numba.cuda.core is in the package numba-cuda, not in Numba itself.
COMPILERS = {
    "numba_cpu": "numba",
    "numba_cuda": "numba.cuda.core.config",
    "triton": "triton.language",
}
_warned = False  # whether a failing cache of kernels was reported


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """`function` compiled by Numba on first use. It releases Python's lock while it runs.

    The machine code is cached in `__pycache__` next to the function's file, or in the user's cache
    folder (or $NUMBA_CACHE_DIR). Where the cache cannot be written or read, the process compiles in
    memory and warns once. When a Python file that the kernel may be compiled from has changed
    (`_source_hash`), it is compiled again and replaces the cached code. Only kernels that were
    renamed or moved leave files in the cache.

    Args:
        function: The kernel.
        options: Options of numba.njit.
    """
    from numba import njit

    try:
        kernel = njit(nogil=True, cache=True, **options)(function)
        # Numba's own stamp covers the function's file, not those of the functions that it calls
        index = kernel._cache._cache_file
        index._source_stamp = (index._source_stamp, _source_hash(function.__code__.co_filename))
        _survive_errors(kernel._cache)
    except (RuntimeError, AttributeError) as error:  # no folder; a Numba with another cache
        if isinstance(error, RuntimeError):
            _warn_of_cache(error)
        return njit(nogil=True, **options)(function)
    return kernel


def _survive_errors(cache: Any) -> None:
    """Make Numba compile a kernel in memory where its cache cannot be read or written.

    Numba raises there: OSError for a full disk, and whatever pickle raises for a file that a crash
    truncated. Such a file is emptied, so that it can be written again.
    """
    load = cache.load_overload
    save = cache.save_overload

    def load_or_none(*args: Any) -> Any:
        try:
            return load(*args)
        except Exception as error:
            _warn_of_cache(error)
            with contextlib.suppress(OSError):
                cache.flush()
            return None  # Numba compiles

    def save_or_not(*args: Any) -> None:
        try:
            save(*args)
        except Exception as error:
            _warn_of_cache(error)

    cache.load_overload = load_or_none
    cache.save_overload = save_or_not


def _warn_of_cache(error: Exception) -> None:
    """Warn, once in a process, that kernels cannot be cached on disk."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"kernels: Numba's cache on disk cannot be read or written ({error}). Kernels are "
            "compiled in memory, which takes seconds in each process. Free the disk, or name "
            "another folder by NUMBA_CACHE_DIR.",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def _source_hash(file: str) -> str:
    """Hash of all Python files that a kernel defined in `file` may be compiled from.

    Packages of the library do not import each other's kernels, so these are the files of its own
    package (`asrkit/losses/`, `asrkit/decoders/`) and this one. Outside asrkit it is `file` alone.
    """
    root = Path(__file__).resolve().parent
    path = Path(file).resolve()
    sources = [path]
    if path.is_relative_to(root):
        package = root / path.relative_to(root).parts[0]
        sources = [Path(__file__), *sorted(package.rglob("*.py"))]
    contents = b"".join(source.read_bytes() for source in sources)
    return hashlib.sha256(contents).hexdigest()


@functools.cache
def compiler_fails(impl: str) -> str:
    """Why the losses of `impl` cannot be compiled here; "" if they can.

    A process imports each compiler once, without touching a GPU.

    Args:
        impl: A file of kernels: "numba_cpu", "numba_cuda" or "triton".
    """
    if impl != "triton" and JIT_OFF:
        return "NUMBA_DISABLE_JIT is set"
    try:
        import_module(COMPILERS[impl])
    except Exception as error:  # whatever a broken package raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def numba_ptx(kernel: Any, types: tuple[Any, ...], cc: int) -> str:
    """The PTX of a kernel of numba.cuda.jit for a GPU that this machine may lack.

    Args:
        kernel: The kernel.
        types: Numba's types of its arguments.
        cc: Compute capability, 90 for sm_90.
    """
    from numba import cuda

    capability = divmod(cc, 10)
    # Numba queries the device if a kernel calls a function of its own.
    device = SimpleNamespace(compute_capability=capability)
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
        return cuda.compile(kernel.py_func, types, cc=capability, device=False, abi="numba")[0]
