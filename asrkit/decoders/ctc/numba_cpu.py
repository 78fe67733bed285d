"""The best token of every frame, and the likeliest alignment of a text, compiled for the CPU.

Of `best_tokens` each row of V scores is read from memory once.

Floats are compared by their bits, read as integers: without the sign bit, the larger float is the
larger integer. So one loop serves every width, float16 and bfloat16 too, and the compiler turns an
integer maximum into vector instructions. (It does not do so for a float maximum, where NaN makes
the order of comparisons matter.) Floor: 4 V bytes a valid frame in float32.
"""

import math
from collections.abc import Callable
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
PARALLEL_CELLS = 1 << 18  # states of alignments times frames, likewise


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
    _by_rows(work, len(bits), parallel=log_probs.numel() >= PARALLEL_FROM)
    return best.view(log_probs.dtype), tokens


def align(
    log_probs: Tensor, labels: Tensor, counts: Tensor, lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Frames, durations (B, N) and scores (B,) of `best_alignment`, on the CPU.

    The scores of all states are kept before every K-th frame only, K about the root of the frames;
    from there the moves of K frames are found once more on the way back. So a text of N labels
    takes some 40 N sqrt(T) bytes, and twice the time of one way.

    Args:
        log_probs: (B, T, V) float32 or float64; what is not finite is impossible.
        labels: (B, N) int64, padding -1.
        counts: (B,) labels of each utterance.
        lengths: (B,) valid frames.
        blank: Index of the blank, from 0.
    """
    frames = torch.full_like(labels, -1)
    durations = torch.full_like(labels, -1)
    scores = torch.full_like(counts, -torch.inf, dtype=torch.float64)
    work = partial(
        _align,
        log_probs.detach().numpy(),
        labels.contiguous().numpy(),
        counts.long().numpy(),
        lengths.long().numpy(),
        blank,
        frames.numpy(),
        durations.numpy(),
        scores.numpy(),
    )
    cells = len(labels) * log_probs.shape[1] * labels.shape[1]
    _by_rows(work, len(labels), parallel=cells >= PARALLEL_CELLS)
    return frames, durations, scores.to(log_probs.dtype)


def _by_rows(work: Callable[[int, int], None], rows: int, *, parallel: bool) -> None:
    """Do the work of (first row, step) on as many threads as torch uses, or on this one."""
    threads = min(torch.get_num_threads(), rows) if parallel else 1
    if threads <= 1:
        work(0, 1)
        return
    with ThreadPoolExecutor(threads) as pool:  # they end with the call: a process forked later
        list(pool.map(lambda first: work(first, threads), range(threads)))  # would not have them


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


@njit
def _possible(score):
    """The score, -inf where it is not finite."""
    return score if math.isfinite(score) else -math.inf


@njit
def _advance(score, log_probs, labels, blank, first, last, moves):
    """Scores of the states first to last after one more frame, in place, and how they were reached.

    Args:
        score: (S,) float64, of each state before the frame.
        log_probs: (V,) of the frame.
        labels: (N,) of the text, where S is 2 N + 1.
        blank: Index of the blank.
        first: The first state from which the end can be reached.
        last: The last state that can be reached.
        moves: (S,) int8, where the states that each one came from are written, counted back.
    """
    of_blank = _possible(log_probs[blank])
    for state in range(last, first - 1, -1):  # down: what is read is still of the frame before
        best, move = score[state], 0
        if state > 0 and score[state - 1] > best:
            best, move = score[state - 1], 1
        if state % 2 == 0:
            score[state] = best + of_blank
        else:
            n = state // 2
            if n > 0 and labels[n] != labels[n - 1] and score[state - 2] > best:
                best, move = score[state - 2], 2
            score[state] = best + _possible(log_probs[labels[n]])
        moves[state] = move


@njit
def _reached(t, T, states):
    """The first state from which the end can be reached behind frame t, and the last reached."""
    return max(states - 2 * (T - t), 0), min(2 * t + 1, states - 1)


@compiled
def _align(log_probs, all_labels, counts, lengths, blank, frames, durations, scores, begin, step):
    """Fill frames, durations (B, N) and scores (B,) of utterances begin, begin + step, ...

    Args:
        log_probs: (B, T, V).
        all_labels: (B, N) int64.
        counts: (B,) labels of each utterance.
        lengths: (B,) valid frames.
        blank: Index of the blank.
        frames: (B, N) int64, -1 throughout.
        durations: (B, N) int64, -1 throughout.
        scores: (B,) float64, -inf throughout.
        begin: The first utterance.
        step: Utterances from one to the next.
    """
    for b in range(begin, counts.shape[0], step):
        N, T = counts[b], lengths[b]
        labels, states = all_labels[b, :N], 2 * N + 1
        if T == 0:
            if N == 0:
                scores[b] = 0.0
            continue
        size = int(math.ceil(3 * math.sqrt(T)))  # frames of a block: a score takes as much as 8 moves
        kept = np.empty(((T + size - 1) // size, states))
        moves = np.zeros((size, states), np.int8)
        score = np.full(states, -np.inf)
        score[0] = 0.0  # before the first frame
        for t in range(T):
            if t % size == 0:
                kept[t // size] = score
            first, last = _reached(t, T, states)
            _advance(score, log_probs[b, t], labels, blank, first, last, moves[0])
        state = states - 1
        if N > 0 and score[state - 1] > score[state]:
            state -= 1
        if score[state] == -np.inf:
            continue
        scores[b] = score[state]
        durations[b, :N] = 0
        for block in range(kept.shape[0] - 1, -1, -1):
            score[:] = kept[block]
            start, end = block * size, min((block + 1) * size, T)
            for t in range(start, end):
                first, last = _reached(t, T, states)
                _advance(score, log_probs[b, t], labels, blank, first, last, moves[t - start])
            for t in range(end - 1, start - 1, -1):
                if state % 2 == 1:
                    frames[b, state // 2] = t
                    durations[b, state // 2] += 1
                state -= moves[t - start, state]
