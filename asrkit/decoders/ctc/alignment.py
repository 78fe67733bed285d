"""The likeliest CTC alignment of given labels to frames (Viterbi)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from asrkit.decoders.hypotheses import PADDING


def best_alignment(
    log_probs: Tensor, lengths: Tensor, labels: Tensor, counts: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """(first frame, frames) of each label's run in the likeliest alignment, (B, N), padding -1.

    States are blank, first label, blank, second label and so on: S = 2 N + 1. Each frame stays,
    moves on, or skips the blank between two different labels; of equals the first of these.

    Args:
        log_probs: (B, T, V) log-probabilities in nats.
        lengths: (B,) valid frames, int64.
        labels: (B, N) int64.
        counts: (B,) int64, labels of each utterance, which its frames have room for.
        blank: Index of the blank.
    """
    B, T, _ = log_probs.shape
    N = labels.shape[1]
    size = (B, 2 * N + 1)
    tokens = labels.new_full(size, blank)
    tokens[:, 1::2] = labels.clamp(min=0)
    may_skip = torch.zeros(size, dtype=torch.bool, device=labels.device)
    may_skip[:, 3::2] = labels[:, 1:] != labels[:, :-1]
    score = log_probs.new_full(size, -torch.inf)
    score[:, 0] = 0  # before the first frame
    moves = []
    for t in range(T):
        one = pad(score, (1, 0), value=-torch.inf)[:, :-1]
        two = pad(score, (2, 0), value=-torch.inf)[:, :-2]
        two = two.masked_fill(~may_skip, -torch.inf)
        best, move = torch.stack([score, one, two]).max(0)
        best = best + log_probs[:, t].gather(1, tokens)
        goes_on = (lengths > t)[:, None]
        score = torch.where(goes_on, best, score)
        moves.append(move.masked_fill(~goes_on, 0))
    last = 2 * counts[:, None]  # the blank after the last label, or that label
    before = (last - 1).clamp(min=0)
    state = torch.where(score.gather(1, last) >= score.gather(1, before), last, before)
    frames = labels.new_full((B, N + 1), PADDING)
    durations = labels.new_zeros(B, N + 1)
    for t in reversed(range(T)):
        is_label = (state % 2 == 1) & (lengths > t)[:, None]
        column = torch.where(is_label, state // 2, N)
        frames.scatter_(1, column, t)
        durations.scatter_add_(1, column, torch.ones_like(column))
        state = state - moves[t].gather(1, state)
    durations = durations.masked_fill(frames == PADDING, PADDING)
    return frames[:, :N], durations[:, :N]
