"""How fast one core works alone, and when all cores work at once."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from time import thread_time
from typing import NamedTuple

import torch


class CoreRates(NamedTuple):
    """Work a CPU second of a core, in one repeat: alone, and the mean of all cores at once."""

    alone: float
    together: float


def usable_cores(most: int) -> list[int]:
    """Numbers of the cores that this process may use, at most `most` of them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:most]
    return [0]


def core_rates(
    work: Callable[[], object], amount: float, *, cores: list[int], repeats: int
) -> list[CoreRates]:
    """Do the same work on one core and on all cores at once, in turns; after a warm-up.

    CPU time of each thread is counted, so that it does not matter what else the machine does.

    Args:
        work: What a core does; torch has one thread within it.
        amount: What one call of `work` is worth, as seconds of speech.
        cores: Numbers of the cores; a thread is pinned to each, where the system can.
        repeats: Repeats that count.
    """
    free = list(cores)

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {free.pop()})  # of this thread alone
        torch.set_num_threads(1)

    def rate(_: int) -> float:
        start = thread_time()
        work()
        return amount / (thread_time() - start)

    threads = torch.get_num_threads()
    found = []
    try:
        with ThreadPoolExecutor(len(cores), initializer=pin) as pool:
            _mean_rate(pool, rate, len(cores))  # warms up
            for _ in range(repeats):
                alone = _mean_rate(pool, rate, 1)
                found.append(CoreRates(alone, _mean_rate(pool, rate, len(cores))))
    finally:
        torch.set_num_threads(threads)
    return found


def _mean_rate(pool: ThreadPoolExecutor, rate: Callable[[int], float], busy: int) -> float:
    return fmean(pool.map(rate, range(busy)))
