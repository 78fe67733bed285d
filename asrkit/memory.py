"""Memory: the peak of a call, what is free on the machine, mapped files, and what glibc keeps."""

import ctypes
import functools
import math
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from asrkit.shapes import expect_choice

M_ARENA_MAX = -8  # the constant in glibc's malloc.h
# oneDNN's cache of kernels, and that of torch's interface to it. By default each keeps 1,024: for a
# linear layer and 900 numbers of frames they took 394 MiB. A batch needs about 20.
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
MOST_KERNELS = 128
KEPT_MEMORY: list[Callable[[], None]] = []  # functions that free memory kept for later calls
_MAPPED = WeakSet[mmap.mmap]()
_MAPPED_LOCK = threading.Lock()


@functools.cache
def _glibc() -> Any:
    """The C library of this process, or None where it is not glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None


def return_free_memory() -> None:
    """Return memory to the operating system: what glibc keeps of freed memory, and mapped files.

    What was read of a file of `map_file` counts as memory of this process until then. It is read
    again when it is needed.
    """
    with _MAPPED_LOCK:
        mapped = [*_MAPPED]
    for data in mapped:
        if hasattr(data, "madvise"):  # not on Windows
            data.madvise(mmap.MADV_DONTNEED)
    if _glibc():
        _glibc().malloc_trim(0)


def share_memory_pool() -> None:
    """Make all threads of this process allocate from one pool. For whole programs only.

    glibc gives each thread a pool of its own, and memory that is free in one serves no other. Call
    this before the first thread starts: existing pools stay. Call it before the first product too:
    it also bounds the kernels that oneDNN keeps, of which each shape needs others.
    """
    for cache in KERNEL_CACHES:
        os.environ.setdefault(cache, str(MOST_KERNELS))
    if _glibc():
        _glibc().mallopt(M_ARENA_MAX, 1)


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file, which are read when they are used. A change of the file changes them.

    Bytes that are written in memory never reach the file, and `return_free_memory` drops them.

    Raises:
        ValueError: The file is empty.
    """
    with path.open("rb") as file:
        # Copy on write, though nothing is written: torch warns of read-only memory.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    with _MAPPED_LOCK:
        _MAPPED.add(data)
    return data


def peak_memory(fn: Callable[[], object], *, device: str = "cpu") -> int:
    """Peak tensor memory in bytes of one call of `fn`, beyond what was allocated before it.

    On a CPU it counts the allocations of torch's own (c10) allocator, which torchaudio's compiled
    code uses too. Arrays of NumPy and Numba and workspaces of libraries (BLAS) are not counted, and
    freeing older memory is not subtracted. Memory that asrkit keeps for later calls is freed first.
    On CUDA it is torch.cuda.max_memory_allocated.
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
    # The profiler looks for a GPU, and reports an error when there is none.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # torch.profiler.profile is this too, and imports torch's compiler first: seconds.
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        fn()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(0, *accumulate((event.nbytes() for event in events), initial=0))


def free_memory(system: Path = Path("/")) -> float:
    """Bytes that processes can take without swapping; infinity where the system does not show it.

    Args:
        system: Root of Linux's file system, which shows free memory and the container's limit
            (cgroups v2).
    """
    limits = [math.inf]
    for file, pattern, unit in (
        ("proc/meminfo", r"MemAvailable: *(\d+)", 1024),
        ("sys/fs/cgroup/memory.max", r"(\d+)", 1),  # or "max"
    ):
        path = system / file
        if path.exists() and (limit := re.search(pattern, path.read_text())):
            limits.append(unit * int(limit[1]))
    return min(limits)
