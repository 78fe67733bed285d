"""The likeliest CTC alignment of given labels to frames (Viterbi).

It says when a text was spoken that something else than CTC wrote, such as an attention decoder.
Source: Graves et al. 2006, section 4.1, with the largest in place of the sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from asrkit.decoders.ctc.numba_cpu import align
from asrkit.decoders.ctc.sequential import blank_index
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.shapes import dims, expect, valid_mask


class Alignment(NamedTuple):
    """Labels in time; where a text has no alignment, all of its frames and durations are -1."""

    frames: Tensor  # (B, N) int64, first frame of each label's run, padding -1
    durations: Tensor  # (B, N) int64, frames of the run, padding -1
    scores: Tensor  # (B,) log-probability of the alignment in nats; -inf where there is none


def ctc_alignment(
    log_probs: Tensor, lengths: Tensor, hypotheses: Hypotheses, *, blank: int = -1
) -> Alignment:
    """The likeliest alignment of each text to its frames.

    A text has none that is longer than its frames have room for, a blank between equal labels
    included, or where a frame is NaN.

    Args:
        log_probs: (B, T, V) log-probabilities in nats, float of 16 bits or more; computed in
            float32 at least.
        lengths: (B,) valid frames, int32 or int64; 0 is allowed.
        hypotheses: Of these B utterances; their labels are looked at alone.
        blank: Index of the blank; negative counts from the end.

    Raises:
        ValueError: The hypotheses are of another batch, or a label is none of CTC's.

    >>> log_probs = torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]]]).log()
    >>> greedy = Hypotheses.from_lists([[(0, 0, 0)]], [torch.zeros(())], "by hand")
    >>> alignment = ctc_alignment(log_probs, torch.tensor([3]), greedy)
    >>> alignment.frames.tolist(), alignment.durations.tolist()
    ([[1]], [[2]])
    """
    longest = check_batch(log_probs, lengths, "B T V", "log_probs")
    B, _, V = log_probs.shape
    blank = blank_index(blank, V)
    labels = hypotheses.labels
    dims(labels, "B N", "hypotheses", B=B)
    is_strange = (labels < PADDING) | (labels >= V) | (labels == blank)
    strange = labels[is_strange]
    wanted = f"labels from 0 to below V={V}, without the blank {blank}"
    expect(len(strange) == 0, "hypotheses", wanted, strange[:5].tolist())
    with torch.inference_mode(False), torch.no_grad():
        log_probs = log_probs[:, :longest]
        if log_probs.device.type == "cpu":  # compiled code looks at few of them
            log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
        else:
            log_probs = possible(log_probs, lengths, blank)
        return best_alignment(log_probs, labels, hypotheses.lengths, lengths, blank)


def possible(log_probs: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """The log-probabilities in float32 or float64, -inf where they are not finite.

    Behind an utterance nothing but a blank is possible, and it costs nothing.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    wide = log_probs.to(dtype)
    ended = ~valid_mask(lengths, log_probs.shape[1])[..., None]
    impossible = ~wide.isfinite() | ended
    wide = wide.masked_fill(impossible, -torch.inf)
    wide[..., blank, None].masked_fill_(ended, 0)
    return wide


def best_alignment(
    log_probs: Tensor, labels: Tensor, counts: Tensor, lengths: Tensor, blank: int
) -> Alignment:
    """What `ctc_alignment` returns, without checks: compiled on a CPU, else `align_by_frames`."""
    if log_probs.device.type == "cpu":
        return Alignment(*align(log_probs, labels, counts, lengths, blank))
    return align_by_frames(log_probs, labels, counts, blank)


def align_by_frames(log_probs: Tensor, labels: Tensor, counts: Tensor, blank: int) -> Alignment:
    """The likeliest alignments on any device, one frame of all utterances in each turn.

    States are blank, first label, blank, second label and so on: S = 2 N + 1. Each frame stays,
    moves on, or skips the blank between two different labels; of equals the first of these.

    Args:
        log_probs: (B, T, V), as `possible` returns them.
        labels: (B, N) int64, padding -1.
        counts: (B,) int64, labels of each utterance.
        blank: Index of the blank, from 0.
    """
    B, T, _ = log_probs.shape
    N = labels.shape[1]
    size = (B, 2 * N + 1)
    tokens = labels.new_full(size, blank)
    tokens[:, 1::2] = labels.clamp(min=0)
    may_skip = torch.zeros(size, dtype=torch.bool, device=labels.device)
    changes = labels.diff(dim=1) != 0
    may_skip[:, 3::2] = changes
    score = log_probs.new_full(size, -torch.inf)
    score[:, 0] = 0  # before the first frame
    moves = []
    for t in range(T):
        before = pad(score, (2, 0), value=-torch.inf)
        two_before = before[:, :-2].masked_fill(~may_skip, -torch.inf)
        one_before = before[:, 1:-1]
        best, move = torch.stack([score, one_before, two_before]).max(0)
        score = best + log_probs[:, t].gather(1, tokens)
        moves.append(move)
    last = 2 * counts[:, None]
    ends = torch.cat([last, (last - 1).clamp(min=0)], 1)  # the last blank, or the label before it
    scores, which = score.gather(1, ends).max(1, keepdim=True)
    states = [ends.gather(1, which)]
    for move in reversed(moves):
        steps = move.gather(1, states[-1])
        states.append(states[-1] - steps)
    path = torch.cat(states[::-1], 1)
    path = path[:, 1:]  # (B, T)
    is_label = path % 2 == 1
    column = torch.where(is_label, path // 2, N)
    times = torch.arange(T, device=labels.device).expand_as(column)
    ones = torch.ones_like(column)
    frames = labels.new_full((B, N + 1), PADDING)
    frames = frames.scatter_reduce(1, column, times, "amin", include_self=False)
    frames = frames.masked_fill(scores == -torch.inf, PADDING)
    durations = labels.new_zeros(B, N + 1)
    durations = durations.scatter_add(1, column, ones)
    durations = durations.masked_fill(frames == PADDING, PADDING)
    return Alignment(
        frames=frames[:, :N],
        durations=durations[:, :N],
        scores=scores[:, 0],
    )
