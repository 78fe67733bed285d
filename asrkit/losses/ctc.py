"""CTC loss by frames: one step of a recursion for the whole batch, which reads nothing from a GPU.

torch's own kernel is the reference, and faster. On a GPU it copies the lengths there from ordinary
memory, and that copy waits until the device has done everything before it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.losses.lattice import as_index, check_lengths, check_scores
from asrkit.runtime import settle_after_fork, to_device
from asrkit.shapes import dims

NEVER = -1e30  # nats; -inf would make gradients NaN


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
) -> Tensor:
    """Negative log-likelihood of the targets in nats (CTC), (B,); 0 where no alignment fits.

    Lengths and targets that lie on the host are checked there, and nothing waits for the device.
    On a CPU prefer `torch.nn.functional.ctc_loss`, one compiled kernel.

    Source: A. Graves et al., "Connectionist Temporal Classification", ICML 2006, equations 6 and 7.

    Args:
        log_probs: Log-probabilities (B, T, V), float32 or float64.
        targets: Labels (B, U), int32 or int64; padding may hold anything.
        lengths: Frames of each utterance (B,), int32 or int64.
        target_lengths: Labels of each utterance (B,), int32 or int64.
        blank: Index of blank, -V to V - 1.

    Raises:
        ValueError: An argument does not fit; the message names it and a remedy.
    """
    if not torch.compiler.is_compiling():
        settle_after_fork()
    check_scores(log_probs, "log_probs")
    _, T, V = dims(log_probs, "B T V", "log_probs")
    _, U = dims(targets, "B U", "targets")
    counts = check_lengths(
        targets, lengths, target_lengths, blank, like=log_probs, T=T, U1=U + 1, V=V
    )
    frames = to_device(counts[:, 0], log_probs.device)
    labels = to_device(counts[:, 1], log_probs.device)
    blank = blank % V
    tokens = as_index(targets, log_probs.device).clamp(0, V - 1)  # padding may hold anything
    states = _with_blanks(tokens, blank)  # (B, S)
    scores = log_probs.gather(2, states[:, None].expand(-1, T, -1))  # (B, T, S)
    alpha = _last_scores(scores, states, frames, blank)
    # an alignment ends on the last label or on the blank behind it
    on_blank = alpha.gather(1, 2 * labels[:, None])
    on_label = alpha.gather(1, (2 * labels[:, None] - 1).clamp(min=0))
    on_label = on_label.where(labels[:, None] > 0, NEVER)
    loss = -torch.logaddexp(on_blank, on_label)[:, 0]
    return loss.where(loss < -NEVER / 2, 0.0)


def _with_blanks(labels: Tensor, blank: int) -> Tensor:
    """The states of an alignment (B, 2 U + 1): blank, label, blank, label, ..., blank."""
    B, U = labels.shape
    states = labels.new_full((B, 2 * U + 1), blank)
    states[:, 1::2] = labels
    return states


def _last_scores(scores: Tensor, states: Tensor, frames: Tensor, blank: int) -> Tensor:
    """Log-probability (B, S) of being in each state after an utterance's last frame.

    Args:
        scores: Log-probability (B, T, S) of each state's token at each frame.
        states: Tokens of the states (B, S).
        frames: Frames of each utterance (B,).
        blank: Index of blank.
    """
    before = F.pad(states, (2, 0), value=blank)[:, :-2]  # two states earlier
    may_skip = (states != blank) & (states != before)
    starts = torch.arange(states.shape[1], device=states.device) < 2
    alpha = scores[:, 0].where(starts, NEVER)
    for t in range(1, scores.shape[1]):
        advanced = F.pad(alpha, (1, 0), value=NEVER)[:, :-1]
        skipped = F.pad(alpha, (2, 0), value=NEVER)[:, :-2].where(may_skip, NEVER)
        arrived = torch.stack((alpha, advanced, skipped)).logsumexp(0) + scores[:, t]
        alpha = torch.where(t < frames[:, None], arrived, alpha)
    return alpha
