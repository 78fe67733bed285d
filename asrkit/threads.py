"""Threads: CPU cores that this process may use, forked processes, and torch.compile's tracing.

Importing this file does not import torch.
"""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
CONTAINER = Path("/sys/fs/cgroup")
_IMPORTED_BY = os.getpid()  # the process that imported this file, before any fork
_checked_in = _IMPORTED_BY  # the last process in which `single_thread_after_fork` ran


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run `function` outside of torch.compile's graphs, and safely in a forked process.

    Like torch.compiler.disable, which as a decorator would load the whole compiler on import. For
    forked processes see `single_thread_after_fork`.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        import torch

        if torch.compiler.is_compiling():
            return torch.compiler.disable(call)(*args, **kwargs)
        single_thread_after_fork()
        return function(*args, **kwargs)

    return call


def forked() -> bool:
    """Whether this process was forked by one that had imported asrkit.

    Threads of OpenMP do not survive a fork, and GNU's OpenMP ends a process that uses them after
    one. Kernels run on one thread there.
    """
    return os.getpid() != _IMPORTED_BY


def single_thread_after_fork() -> None:
    """Set torch to one thread on the first call in a forked process.

    If the parent has used torch's threads, a large op in the child would wait forever for threads
    that only the parent has. If the parent never used them, raise the number yourself afterwards.
    """
    global _checked_in
    if os.getpid() != _checked_in:
        import torch

        torch.set_num_threads(1)
        _checked_in = os.getpid()


def usable_cores(folder: Path = CONTAINER) -> int:
    """CPU cores that this process may use, by its affinity mask and its container's quota
    (cgroups v2).

    Args:
        folder: Folder in which Linux shows the container's limits.
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
    """The logical CPUs that share a core with this one, as text that is equal for all of them.

    Args:
        cpu: Number of the logical CPU.
        system: Root of Linux's file system; elsewhere each CPU counts as a core of its own.
    """
    file = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return file.read_text() if file.exists() else str(cpu)
