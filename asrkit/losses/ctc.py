"""The CTC loss frame by frame: one step of the recursion for the whole batch.

It is for GPUs, because it never waits for the device. torch's own kernel is faster and is the
reference here, but it copies the lengths to the GPU from pageable memory, and that copy waits until
the device has finished all work queued before.

A compiled GPU kernel would be a file `ctc_triton.py` in this folder with the recursion as an
autograd function. `ctc_loss` would call it after its checks, with an `impl` argument as in
`rnnt_loss`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.devices import to_device
from asrkit.losses.arguments import as_index, check_lengths, check_scores
from asrkit.shapes import dims, expect
from asrkit.threads import single_thread_after_fork

NEVER = -1e30  # nats; -inf would make gradients NaN


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
) -> Tensor:
    """Negative log-likelihood of the targets in nats (CTC), (B,); 0 if no alignment exists.

    Lengths and targets on the host are checked there, and nothing waits for the device. There is no
    `impl`: on a GPU the recursion runs in plain torch. On a CPU prefer torch's compiled kernel,
    `torch.nn.functional.ctc_loss`.

    Source: A. Graves et al., "Connectionist Temporal Classification", ICML 2006, equations 6 and 7.

    Args:
        log_probs: Log-probabilities (B, T, V), float32 or float64.
        targets: Labels (B, U), int32 or int64; padding may hold anything.
        logit_lengths: Frames of each utterance (B,), int32 or int64.
        target_lengths: Labels of each utterance (B,), int32 or int64.
        blank: Index of blank, -V to V - 1.

    Raises:
        ValueError: An argument does not fit; the message names it and a remedy.
    """
    if not torch.compiler.is_compiling():
        single_thread_after_fork()
    check_scores(log_probs, "log_probs")
    wide = log_probs.itemsize > 2
    expect(wide, "log_probs", "float32 or float64", log_probs.dtype, "Pass log_probs.float().")
    _, T, V = dims(log_probs, "B T V", "log_probs")
    _, U = dims(targets, "B U", "targets")
    counts = check_lengths(
        targets, logit_lengths, target_lengths, blank, like=log_probs, T=T, U1=U + 1, V=V
    )
    frames, labels = to_device(counts, log_probs.device)[..., None].unbind(1)  # (B, 1) each
    blank = blank % V
    tokens = as_index(targets, log_probs.device).clamp(0, V - 1)  # padding may hold anything
    # the states of an alignment, (B, S): blank, label, blank, label, ..., blank
    states = F.pad(tokens[..., None], (1, 0), value=blank).flatten(1)
    states = F.pad(states, (0, 1), value=blank)
    two_earlier = F.pad(states, (2, 0), value=blank)[:, :-2]
    may_skip = (states != blank) & (states != two_earlier)
    scores = log_probs.gather(2, states[:, None].expand(-1, T, -1))  # (B, T, S)
    scores = scores.clamp(min=NEVER)
    starts = torch.arange(states.shape[1], device=states.device) < 2
    alpha = scores[:, 0].where(starts, NEVER)  # log-probability of each state, (B, S)
    for t in range(1, T):
        advanced = F.pad(alpha, (1, 0), value=NEVER)[:, :-1]
        skipped = F.pad(alpha, (2, 0), value=NEVER)[:, :-2].where(may_skip, NEVER)
        stepped = torch.stack((alpha, advanced, skipped)).logsumexp(0) + scores[:, t]
        alpha = torch.where(t < frames, stepped, alpha)
    # an alignment ends on the last label or on the blank after it
    on_blank = alpha.gather(1, 2 * labels)
    on_label = alpha.gather(1, (2 * labels - 1).clamp(min=0)).where(labels > 0, NEVER)
    loss = -torch.logaddexp(on_blank, on_label)[:, 0]
    return loss.masked_fill(loss >= -NEVER / 2, 0.0)  # NaN stays NaN
