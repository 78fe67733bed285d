"""The best token of every frame, compiled for the CPU: each row of V scores is read from memory
once.

Floats are compared by their bits, read as integers: without the sign bit, the larger float is the
larger integer, so one loop serves every width, float16 and bfloat16 too, and an integer maximum is
one the compiler turns into vector instructions. (It leaves a float maximum alone, since NaN makes
the order of comparisons matter.) Floor: 4 V bytes a valid frame in float32.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numba import njit
from torch import Tensor

from asrkit.runtime import compiled

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by bytes of the float
SHARED_FROM = 1 << 20  # scores in a batch; below, starting threads takes longer than they save


def best_tokens(log_probs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Score and index of the best of V tokens for each frame within lengths (B,), as `max(-1)`
    finds them: (B, T), padding 0.
    """
    B, T, V = log_probs.shape
    log_probs = log_probs.detach().resolve_neg()
    bits = log_probs.view(BITS[log_probs.element_size()])
    best, tokens = bits.new_zeros(B, T), bits.new_zeros(B, T, dtype=torch.int64)
    if T:
        bits = bits if bits.stride(-1) == 1 else bits.contiguous()
        along_B, along_T, _ = bits.stride()
        memory = bits.as_strided(((B - 1) * along_B + (T - 1) * along_T + V,), (1,)).numpy()
        most = memory.dtype.type(torch.iinfo(bits.dtype).max)
        infinity = log_probs.new_tensor(torch.inf).view(bits.dtype).numpy()[()]
        given = (
            memory,
            along_B,
            along_T,
            V,
            lengths.long().contiguous().numpy(),
            most,
            infinity,
            best.numpy(),
            tokens.numpy(),
        )
        _share(
            partial(_best_tokens, *given),
            min(torch.get_num_threads(), B) if log_probs.numel() >= SHARED_FROM else 1,
        )
    return best.view(log_probs.dtype), tokens


def _share(work: Callable[[int, int], None], threads: int) -> None:
    """`work(first, step)` for every first < step = threads, at once, in threads that end here: a
    fork finds none to miss.
    """
    if threads == 1:
        return work(0, 1)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first: work(first, threads), range(threads)))


@njit
def _key(bits, most, infinity):
    """An integer ordered as the float with these bits is: both zeros equal, every NaN alike and
    largest, as for torch's `max`.
    """
    integer = type(most)
    size = integer(bits & most)  # without the sign
    ordered = integer(-size) if bits < 0 else size
    return most if size > infinity else ordered


@njit
def _first_best(row, most, infinity):
    best, place = _key(row[0], most, infinity), np.int32(row.shape[0])
    for v in range(row.shape[0]):
        best = max(best, _key(row[v], most, infinity))
    for v in range(
        row.shape[0]
    ):  # the row is in the nearest cache now; the first of equals is the least
        place = min(
            place, np.int32(v) if _key(row[v], most, infinity) == best else np.int32(row.shape[0])
        )
    return place


@compiled
def _best_tokens(memory, along_B, along_T, V, lengths, most, infinity, best, tokens, first, step):
    for b in range(first, lengths.shape[0], step):
        for t in range(lengths[b]):
            row = memory[b * along_B + t * along_T :][:V]
            tokens[b, t] = _first_best(row, most, infinity)
            best[b, t] = row[tokens[b, t]]
