"""CTC on the CPU, compiled: the best token of every frame, and the likeliest alignment of a text.

`best_tokens` reads each row of V scores from memory once.

Floats are compared by their bits, read as integers: without the sign bit, the larger float is the
larger integer. So one loop serves every width, float16 and bfloat16 too, and the compiler turns an
integer maximum into vector instructions. It does not do so for a maximum of floats, because NaN
makes the order of comparisons matter. Lower bound: 4 V bytes read per valid frame in float32.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numba import njit
from torch import Tensor

from asrkit.compilers import compiled

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by bytes of the float
# Sizes from which threads save more time than their start takes:
PARALLEL_FROM = 1 << 20  # scores in a batch
PARALLEL_CELLS = 1 << 18  # states of alignments times frames
BLOCK_BYTES = 1 << 20  # moves of one alignment in a block of frames


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
    """What `ctc_alignment` returns, without checks: frames, durations (B, N) and scores (B,).

    The scores of all states are kept before each block of frames. The moves inside a block are
    computed again on the way back. For T frames and N labels that takes about 8 N sqrt(T) bytes, or
    `BLOCK_BYTES`. Sums are in float64. Of equal paths, the one that stays longer wins.

    Args:
        log_probs: (B, T, V) on any device; values that are not finite are impossible.
        labels: (B, N) int64, padding -1.
        counts: (B,) labels of each utterance.
        lengths: (B,) valid frames.
        blank: Index of the blank, from 0.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    frames = torch.full_like(labels, -1, device="cpu")
    durations = frames.clone()
    scores = torch.full_like(counts, -torch.inf, dtype=torch.float64, device="cpu")
    work = partial(
        _align,
        log_probs.detach().to("cpu", dtype).contiguous().numpy(),
        labels.cpu().contiguous().numpy().view(np.uint64),
        counts.cpu().numpy(),
        lengths.long().cpu().contiguous().numpy(),
        blank,
        frames.numpy(),
        durations.numpy(),
        scores.numpy(),
    )
    cells = log_probs.shape[1] * labels.numel()
    _by_rows(work, len(labels), parallel=cells >= PARALLEL_CELLS)
    device = labels.device
    return frames.to(device), durations.to(device), scores.to(device, dtype)


def _by_rows(work: Callable[[int, int], None], rows: int, *, parallel: bool) -> None:
    """Call work(first row, step) on as many threads as torch uses, or on this one."""
    threads = min(torch.get_num_threads(), rows) if parallel else 1
    if threads <= 1:
        work(0, 1)
        return
    # the threads end with the call, since a process that is forked later would not have them
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first: work(first, threads), range(threads)))


@njit
def _key(bits, most, infinity):
    """An integer that is ordered like the float with these bits.

    As in torch's `max`, both zeros are equal, and all NaN are equal and largest.
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
    """Index of the largest score; of equal scores, the first."""
    V = row.shape[0]
    best = _key(row[0], most, infinity)
    for v in range(V):
        best = max(best, _key(row[v], most, infinity))
    # the row is in the nearest cache now; the first of equal scores has the lowest index
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
        bits: (B, T, V), bits of the scores.
        lengths: (B,) valid frames.
        most: The largest integer of the bits' type.
        infinity: The bits of infinity.
        best: (B, T), bits of the best scores.
        tokens: (B, T) int64, their indices.
        first: The first utterance.
        step: The step from one utterance to the next.
    """
    for b in range(first, lengths.shape[0], step):
        for t in range(lengths[b]):
            tokens[b, t] = _first_best(bits[b, t], most, infinity)
            best[b, t] = bits[b, t, tokens[b, t]]


@njit
def _advance(log_probs, blank, labels, skips, start, end, score, moves):
    """Advance the scores by the frames from start to end, for the labels that a path can reach.

    Args:
        log_probs: (T, V).
        blank: Index of the blank.
        labels: (N,) uint64.
        skips: (N,) float64, 0 where a label may follow the one before it at once, else -inf.
        start: The first frame.
        end: The frame after the last one.
        score: (2, 2, N + 1) float64, scores before even and odd frames: of the blanks after 0 to N
            labels, and of the labels, from 1.
        moves: (frames, N + 1) int8, written: 1 where a label was reached from the blank before it,
            2 or 3 from the label before it; plus 4 where the blank was reached from its label.
    """
    (T, _), N = log_probs.shape, len(labels)
    for t in range(start, end):
        first, last = max(N - T + t + 1, 1), min(t + 1, N)
        here, back = slice(first, last + 1), slice(first - 1, last)
        before, after = score[t % 2], score[1 - t % 2]
        blanks, stay = before[0, here], before[1, here]
        step, skip = before[0, back], before[1, back]
        new_blanks, new, move = after[0, here], after[1, here], moves[t - start, here]
        may_skip, tokens = skips[back], labels[back]
        of_blank = log_probs[t, blank]
        if not math.isfinite(of_blank):
            of_blank = -math.inf
        after[0, 0] = before[0, 0] + of_blank
        for n in range(len(tokens)):  # a separate loop, so the one below is vectorised
            of_label = log_probs[t, tokens[n]]
            new[n] = of_label if abs(of_label) < math.inf else -math.inf
        for n in range(len(tokens)):
            best = step[n] if step[n] > stay[n] else stay[n]
            skipped = skip[n] + may_skip[n]
            new[n] += skipped if skipped > best else best
            new_blanks[n] = of_blank + (stay[n] if stay[n] > blanks[n] else blanks[n])
            move[n] = (step[n] > stay[n]) + 2 * (skipped > best) + 4 * (stay[n] > blanks[n])


@compiled
def _align(log_probs, all_labels, counts, lengths, blank, frames, durations, scores, begin, step):
    """Fill frames, durations (B, N) and scores (B,) of utterances begin, begin + step, ...

    Args:
        log_probs: (B, T, V).
        all_labels: (B, N) uint64.
        counts: (B,) labels of each utterance.
        lengths: (B,) valid frames.
        blank: Index of the blank.
        frames: (B, N) int64, -1 throughout.
        durations: (B, N) int64, -1 throughout.
        scores: (B,) float64, -inf throughout.
        begin: The first utterance.
        step: The step from one utterance to the next.
    """
    for b in range(begin, len(counts), step):
        N, T = counts[b], lengths[b]
        valid, labels = log_probs[b, :T], all_labels[b, :N]
        skips = np.zeros(N)
        skips[:1] = -np.inf
        skips[1:][labels[1:] == labels[:-1]] = -np.inf
        # a frame of a block takes 1 byte for each label, and the scores before a block take 16
        size = min(max(4 * int(math.sqrt(T)), BLOCK_BYTES // (N + 1)), T + 1)
        kept = np.empty((T // size + 1, 2, N + 1))
        moves = np.zeros((size, N + 1), np.int8)
        score = np.full((2, 2, N + 1), -np.inf)
        score[0, 0, 0] = 0.0  # before the first frame
        for start in range(0, T, size):
            kept[start // size] = score[start % 2]
            end = min(start + size, T)
            _advance(valid, blank, labels, skips, start, end, score, moves)
        on_blank, on_label = score[T % 2, 0, N], score[T % 2, 1, N]
        scores[b] = max(on_blank, on_label)
        if scores[b] == -np.inf:
            continue
        durations[b, :N] = 0
        state = 2 * N - (on_label > on_blank)  # label n is 2 n - 1, the blank after it 2 n
        for start in range((T - 1) // size * size, -1, -size):
            end = min(start + size, T)
            if end < T:
                score[:] = kept[start // size]
                _advance(valid, blank, labels, skips, start, end, score, moves)
            for t in range(end - 1, start - 1, -1):
                n = (state + 1) // 2
                move = moves[t - start, n]
                if state % 2 == 0:
                    state -= move >> 2
                else:
                    frames[b, n - 1] = t
                    durations[b, n - 1] += 1
                    state -= 2 if move & 2 else move & 1
