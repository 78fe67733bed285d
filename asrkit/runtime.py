"""Questions to torch, Numba, Triton and the operating system.

Eager calls under torch.compile, kernels compiled by Numba and kept on disk, whether Triton works,
which ops make the CPU wait for a GPU, copies that do not, which tensors can be read, autocast, peak
memory, usable cores.

Importing this file tries no compiler and does not touch a GPU.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asrkit.shapes import expect_choice

P = ParamSpec("P")
R = TypeVar("R")
# Read once, as Numba and Triton themselves read them when they are imported.
JIT_OFF = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Tags of ops whose result, or its size, Python has to fetch from the device.
DECIDES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Of constants, whatever torch's defaults are.
CPU_FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
CPU_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
_IMPORTED_BY = os.getpid()  # which process, before any fork
_settled_in = _IMPORTED_BY  # the process whose threads of torch are its own
M_ARENA_MAX = -8  # as malloc.h of glibc has it
CONTAINER = Path("/sys/fs/cgroup")
KEPT_MEMORY: list[Callable[[], None]] = []  # each frees memory that is kept for a later call
_warned = False  # whether a failing cache of kernels was reported
# Names of ops that wait only where an index is a boolean mask: how many positions it selects only
# the device knows.
INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_unsafe_index",
    "_unsafe_index_put",
    "_index_put_impl_",
}


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `function` runs outside a graph of torch.compile, and in a forked process alone.

    Like torch.compiler.disable, which as a decorator would load the whole compiler on import; see
    `settle_after_fork` for the rest.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(call)(*args, **kwargs)
        settle_after_fork()
        return function(*args, **kwargs)

    return call


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """`function` compiled by Numba on first use; while it runs, other Python threads run too.

    The machine code is kept in `__pycache__` beside the function's file, or in the user's cache
    folder (or $NUMBA_CACHE_DIR); where none can be written, or what is kept there cannot be read,
    the process compiles in memory, and a warning says so once. When a Python file that the kernel
    may be made of has changed (`_source_hash`), it is compiled again and replaces what was kept.
    Only kernels that were renamed or moved leave files behind there.

    Args:
        function: the kernel.
        options: of numba.njit.
    """
    from numba import njit

    try:
        kernel = njit(nogil=True, cache=True, **options)(function)
        # Numba's own stamp covers the function's file, not those of the functions that it calls
        index = kernel._cache._cache_file
        index._source_stamp = (index._source_stamp, _source_hash(function.__code__.co_filename))
        _survive_errors(kernel._cache)
    except (RuntimeError, AttributeError) as error:  # no folder; a Numba that keeps it elsewhere
        if isinstance(error, RuntimeError):
            _warn_of_cache(error)
        return njit(nogil=True, **options)(function)
    return kernel


def _survive_errors(cache: Any) -> None:
    """Make Numba's cache of one kernel do without what it cannot read or write.

    Numba raises there: OSError for a full disk, and what pickle raises for a file that a crash has
    torn. Such a file is emptied, so that it can be written again.
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
    """Say, once in a process, that kernels could not be kept on disk."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"kernels: what Numba keeps on disk cannot be read or written ({error}). They are "
            "compiled in memory, for seconds in each process. Free the disk, or name another "
            "folder by NUMBA_CACHE_DIR.",
            RuntimeWarning,
            stacklevel=2,
        )


def forked() -> bool:
    """Whether this process was forked by one that had imported asrkit.

    Threads of OpenMP do not survive a fork, and its GNU version ends the process that asks for
    them. Kernels take another path there.
    """
    return os.getpid() != _IMPORTED_BY


def settle_after_fork() -> None:
    """Set torch to one thread the first time that this is called in a forked process.

    Where the parent has used torch's threads, a large op would wait for them for ever in the child,
    which has none of them. Who knows that the parent has not may ask for more threads afterwards.
    """
    global _settled_in
    if os.getpid() != _settled_in:
        torch.set_num_threads(1)
        _settled_in = os.getpid()


@functools.cache
def _glibc() -> Any:
    """The C library of this process, or None where it is not glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None


def return_free_memory() -> None:
    """Return memory that was freed to the system; without glibc that is left to the C library."""
    if _glibc():
        _glibc().malloc_trim(0)


def share_memory_pool() -> None:
    """Let all threads take memory from one pool, for a program that is this process's only one.

    glibc gives each thread a pool of its own, and what one of them holds free serves no other. Call
    it before the first thread: pools that are there stay.
    """
    if _glibc():
        _glibc().mallopt(M_ARENA_MAX, 1)


@functools.cache
def _source_hash(file: str) -> str:
    """Hash of all Python files that a kernel defined in `file` may be compiled from.

    Rooms of the library do not import each other's kernels, so these are the files of its own room
    (`asrkit/losses/`, `asrkit/decoders/`) and this one. Outside asrkit it is `file` alone.
    """
    package = Path(__file__).resolve().parent
    path = Path(file).resolve()
    sources = [path]
    if path.is_relative_to(package):
        room = package / path.relative_to(package).parts[0]
        sources = [Path(__file__), *sorted(room.rglob("*.py"))]
    contents = b"".join(source.read_bytes() for source in sources)
    return hashlib.sha256(contents).hexdigest()


@functools.cache
def triton_fails() -> str:
    """Why Triton cannot be imported here; "" if it can. Tried once in a process, without a GPU."""
    try:
        import_module("triton.language")
    except Exception as error:  # whatever a broken package raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def op_name(func: Any) -> str:
    """Name of an op that a TorchDispatchMode sees, without namespace and overload."""
    return func._schema.name.partition("::")[2]


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an op makes Python wait for a value or a size from the GPU.

    Copies between devices do not count.

    Args:
        func: The op, as a TorchDispatchMode sees it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if op_name(func) in INDEXING:
        indices = [index for index in args[1] if index is not None]
        has_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        # x[mask] = scalar becomes masked_fill
        assigns_scalar = len(args) > 2 and args[2].numel() == 1 and len(indices) == 1
        return has_mask and not assigns_scalar
    return bool(DECIDES & set(func.tags)) and kwargs.get("output_size") is None


class CaptureGuard(TorchDispatchMode):
    """Raises RuntimeError at an op that a graph cannot hold, before a capture is begun.

    Such an op takes a value or a size from the device to Python. A capture that fails there may
    leave torch in a bad state.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(func, args, kwargs):
            raise RuntimeError(f"{func} waits for the GPU")
        with self:  # inference mode passes composite ops undecomposed
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            return func(*args, **kwargs)
        return result


def autocast(
    device_type: str, dtype: torch.dtype | None = None
) -> contextlib.AbstractContextManager[object]:
    """torch.autocast of a device to `dtype`; off for None and float32, even inside another.

    Device "meta", on which a step is traced without its numbers, has no autocast: nothing happens.
    """
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    enabled = dtype not in (None, torch.float32)
    return torch.autocast(device_type, dtype, enabled=enabled)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """dtype of the autocast that is on for a device; None where it is off or there is none."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; the CPU does not wait for a copy from the host to a GPU.

    Such a copy starts from pinned memory, which the caching allocator keeps until it has been read.
    A copy back to the host does wait.

    Args:
        tensor: On the host, or on `device` already.
        device: Where it is wanted.
    """
    if device.type == "cpu":
        return tensor.to(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


def readable(tensor: torch.Tensor) -> bool:
    """Whether Python can read the numbers of `tensor` at once.

    Those on a GPU would have to be waited for; fake tensors, and those in a graph of torch.compile,
    have none.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch._guards.detect_fake_mode(tensor) is None


def peak_memory(fn: Callable[[], object], *, device: str = "cpu") -> int:
    """Peak tensor memory in bytes of one call of `fn`, beyond what was allocated before it.

    On a CPU it counts the allocation events of torch's own (c10) allocator, which torchaudio's
    compiled code uses too. Arrays of NumPy and Numba, and workspaces that a library keeps (BLAS),
    are not seen; freeing older memory is not subtracted. What asrkit keeps for later calls is freed
    first. On CUDA it is torch.cuda.max_memory_allocated.
    """
    for free in KEPT_MEMORY:
        free()
    kind = torch.device(device).type
    expect_choice("device", kind, ("cpu", "cuda"))
    if kind == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler looks for a GPU, and calls it an error that there is none.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        fn()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    return max(0, *accumulate((event.nbytes() for event in events), initial=0))


def usable_cores(folder: Path = CONTAINER) -> int:
    """CPU cores that this process may use, by its affinity mask and its container's quota
    (cgroups v2).

    Args:
        folder: Where Linux says what the container may have.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    file = folder / "cpu.max"
    if not file.exists():
        return cores
    share, period = file.read_text().split()
    if share == "max":  # no quota
        return cores
    return min(cores, math.ceil(int(share) / int(period)))


def same_core(cpu: int, system: Path = Path("/")) -> str:
    """The logical CPUs that share a core with one, in a form in which they can be compared.

    Args:
        cpu: Its number.
        system: Where Linux describes them; elsewhere each is alone.
    """
    file = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return file.read_text() if file.exists() else str(cpu)


def free_memory(system: Path = Path("/")) -> float:
    """Bytes that processes can take without swapping; infinity where the system does not say.

    Args:
        system: Where Linux says what is free on the machine, and the limit of a container (cgroups
            v2).
    """
    limits = [math.inf]
    for file, pattern, unit in (
        ("proc/meminfo", r"MemAvailable: *(\d+)", 1024),
        ("sys/fs/cgroup/memory.max", r"(\d+)", 1),  # or "max"
    ):
        path = system / file
        if path.exists() and (found := re.search(pattern, path.read_text())):
            limits.append(unit * int(found[1]))
    return min(limits)
