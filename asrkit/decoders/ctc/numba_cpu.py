"""The best token of every frame, compiled for the CPU.

Each row of V scores is read from memory once.

Floats are compared by their bits, read as integers: without the sign bit, the larger float is the
larger integer. So one loop serves every width, float16 and bfloat16 too, and the compiler turns an
integer maximum into vector instructions. (It does not do so for a float maximum, where NaN makes
the order of comparisons matter.) Floor: 4 V bytes a valid frame in float32.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numba import njit
from torch import Tensor

from asrkit.runtime import compiled

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by bytes of the float
# scores in a batch; below, starting threads takes longer than they save
PARALLEL_FROM = 1 << 20


def best_tokens(log_probs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Score and index of the best token of each valid frame, as `max(-1)`: (B, T) each, padding 0.

    Args:
        log_probs: (B, T, V) on the CPU, of 16 to 64 bits.
        lengths: (B,) valid frames.
    """
    bits = log_probs.detach().contiguous().view(BITS[log_probs.element_size()])
    best = torch.zeros_like(bits[..., 0])
    tokens = torch.zeros_like(best, dtype=torch.int64)
    infinity = log_probs.new_tensor(torch.inf).view(bits.dtype).numpy()[()]
    work = partial(
        _best_tokens,
        bits.numpy(),
        lengths.long().contiguous().numpy(),
        type(infinity)(torch.iinfo(bits.dtype).max),
        infinity,
        best.numpy(),
        tokens.numpy(),
    )
    threads = 1
    if log_probs.numel() >= PARALLEL_FROM:
        threads = min(torch.get_num_threads(), len(bits))
    if threads == 1:
        work(0, 1)
    else:  # they end with the call: a process forked later would not have them
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda first: work(first, threads), range(threads)))
    return best.view(log_probs.dtype), tokens


@njit
def _key(bits, most, infinity):
    """An integer ordered as the float with these bits is.

    As for torch's `max`, both zeros are equal, and every NaN is alike and largest.
    """
    integer = type(most)
    magnitude = integer(bits & most)  # without the sign
    ordered = magnitude
    if bits < 0:
        ordered = integer(-magnitude)
    if magnitude > infinity:
        ordered = most
    return ordered


@njit
def _first_best(row, most, infinity):
    """Index of the largest score, the first of equals."""
    V = row.shape[0]
    best = _key(row[0], most, infinity)
    for v in range(V):
        best = max(best, _key(row[v], most, infinity))
    # the row is in the nearest cache now; the first of equals is the least index
    first = np.int32(V)
    for v in range(V):
        index = np.int32(V)
        if _key(row[v], most, infinity) == best:
            index = np.int32(v)
        first = min(first, index)
    return first


@compiled
def _best_tokens(bits, lengths, most, infinity, best, tokens, first, step):
    """Fill best and tokens (B, T) for utterances first, first + step, ...

    Args:
        bits: (B, T, V), the scores' bits.
        lengths: (B,) valid frames.
        most: the largest integer of the bits' type.
        infinity: the bits of infinity.
        best: (B, T), bits of the best scores.
        tokens: (B, T) int64, their indices.
        first: the first utterance.
        step: utterances from one to the next.
    """
    for b in range(first, lengths.shape[0], step):
        for t in range(lengths[b]):
            tokens[b, t] = _first_best(bits[b, t], most, infinity)
            best[b, t] = bits[b, t, tokens[b, t]]
